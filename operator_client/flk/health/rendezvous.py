"""Rendezvous: pods that are being prepared, and launchers that run and do not find each other."""

from __future__ import annotations

import re
from typing import Final

from flk.health.cause import Cause, Found
from flk.health.node import node_lost
from flk.observe.model import Evidence, PodPhase
from flk.observe.view import JobView
from flk.spec.units import short_duration, timestamp

JOIN_DELAY: Final = 20.0  # seconds after the start of the last container in which all launchers should have joined
_JOINED: Final = r"(\d+) of (\d+) pods have joined; waiting for pods? ([\d, …]+)"
_NO_LEADER: Final = r"waiting for the launcher of pod 0 at (\S+?):(\d+) since (\d+) s: (.+)"
_UNRESOLVED: Final = ("Name or service not known", "Temporary failure in name resolution", "No address associated")


def _last_lines(view: JobView, pattern: str) -> tuple[str, str, re.Match[str]] | None:
    """Return pod, line and match of the last line of a launcher that matches, if no later line says otherwise."""
    for name in view.seen.logs:
        for line in reversed(view.recent_lines(name)):
            match = re.search(pattern, line)
            if match:
                return name, line, match
            if line.startswith("[rank "):
                break  # ranks have started since
    return None


def _waiting_since(view: JobView) -> float:
    return max((pod.started or 0.0 for pod in view.pods), default=0.0)


def _never_joined(view: JobView) -> Found | None:
    since = _waiting_since(view)
    age = view.now - since
    starting = age < JOIN_DELAY or any(pod.phase != PodPhase.RUNNING for pod in view.pods)
    # A lost node or a refused Service would be why a launcher does not join.
    if not view.from_flk or starting or node_lost(view) or view.refused_services:
        return None
    leader, follower = _last_lines(view, _JOINED), _last_lines(view, _NO_LEADER)
    if leader:
        name, line, match = leader
        index = int(re.split(r"\D", match[3])[0])
        absent = next((pod for pod in view.pods if pod.index == index), None)
        if absent is None:
            return None
        rank = f" (rank {absent.ranks[0]})" if absent.ranks else ""  # pods that the attempt goes without have none
        sentence = (
            f"{match[1]} of {match[2]} pods have joined; the launcher of {absent.name}{rank} has not, and the others "
            "wait for it"
        )
    elif follower and not (view.record and view.record.attempts):
        name, line, match = follower
        absent = view.pods[0]
        if any(words in match[4] for words in _UNRESOLVED):
            return None  # the row of the name says more
        sentence = (
            f"the launcher of {absent.name} (rank 0) has not started, although its container runs; the other pods "
            "wait for it"
        )
    else:
        return None
    runs = f"its container has run for {short_duration(age)}"
    return Found(
        sentence,
        f"{view.kubectl(f'logs {absent.name}')} shows how far it is; {view.kubectl(f'delete pod {absent.name}')} "
        "starts it again",
        [
            Evidence(f"log of {name}", line.strip()),
            Evidence(f"pod {absent.name}", runs, "status.containerStatuses", since),
        ],
        [absent.name],
        since=max([since, *(timestamp(time) for time, _ in view.seen.lines_of(absent.name)[-1:])]),
    )


def _unresolved(view: JobView) -> Found | None:
    found = _last_lines(view, _NO_LEADER)
    # The Service of the first pod has no endpoint before the pod runs, at first or in the place of a lost one.
    if (
        view.refused_services
        or not found
        or view.pods[0].phase != PodPhase.RUNNING
        or not any(words in found[2][4] for words in _UNRESOLVED)
    ):
        return None
    name, line, match = found
    return Found(
        f"{name} cannot resolve the name {match[1]} of the first pod ({match[4].strip()})",
        f"{view.kubectl(f'get service {match[1]}')} shows the service that gives the name; "
        f"{view.kubectl_of_cluster('get pods -n kube-system -l k8s-app=kube-dns')} shows the cluster's DNS; also check "
        "dnsPolicy and dnsConfig in the job's patch",
        [Evidence(f"log of {name}", line.strip(), time=_waiting_since(view))],
        [name],
    )


# The lines of flk_runtime.launcher.processes.preparation.
_PIP: Final = r"\[pod \d+\] (?:installing packages: |pip: )(.*)"
_SETUP: Final = r"\[pod \d+\] (?:running the setup command: |setup: )(.*)"


def _prepares(view: JobView) -> Found | None:
    """Find a pod whose launcher's last line is of its preparation."""
    for pod in view.pods:
        lines = view.recent_lines(pod.name)
        last = lines[-1].strip() if lines and pod.phase == PodPhase.RUNNING else ""
        for pattern, what in ((_PIP, "installs packages"), (_SETUP, "runs the setup command")):
            match = re.fullmatch(pattern, last)
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
    Cause(
        "NameNotResolved",
        _unresolved,
        grace=60,
        awaits="the DNS of the cluster",
    ),
    Cause(
        "RankNeverJoined",
        _never_joined,
        grace=300,
        awaits="a launcher that does not join",
    ),
)
