"""Preparation of pods: packages that are installed, and the setup command, before the launchers meet."""

from __future__ import annotations

import re
from typing import Final

from flk.health.cause import Cause, Found
from flk.observe.model import Evidence, PodPhase
from flk.observe.view import JobView
from flk.units import short_duration
from flk_runtime.contract import user_env

JOIN_TIMEOUT: Final = f"{user_env.JOIN_TIMEOUT} ({short_duration(user_env.JOIN_TIMEOUT.default)})"

# The lines of flk_runtime.launcher.processes.preparation.
_PIP: Final = re.compile(r"\[pod \d+\] (?:installing packages: |pip: )(.*)")
_SETUP: Final = re.compile(r"\[pod \d+\] (?:running the setup command: |setup: )(.*)")


def _prepares(view: JobView) -> Found | None:
    """Find a pod whose launcher's last line is of its preparation."""
    for pod in view.pods:
        lines = view.recent_lines(pod.name)
        last = lines[-1].strip() if lines and pod.phase == PodPhase.RUNNING else ""
        for pattern, what in ((_PIP, "installs packages"), (_SETUP, "runs the setup command")):
            match = pattern.fullmatch(last)
            if match:
                since = pod.started or 0.0
                taken = f" for {short_duration(view.now - since)}" if since else ""
                return Found(
                    f"{pod.name} {what}{taken}; its last line: {match[1]}",
                    f"{view.kubectl(f'logs {pod.name}')} shows what it does; the ranks start afterwards",
                    [Evidence(f"log of {pod.name}", last, time=since)],
                    [pod.name],
                    since=since,
                )
    return None


CAUSES: Final = (
    Cause(
        "Preparing",
        _prepares,
        cured_by="the end of the preparation",
    ),
)
