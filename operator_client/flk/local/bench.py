"""Benchmarks of strategies: the job that measures them, its result, and where results are kept.

`flk_plan.bench` is the side of the ranks. Results are in ``$XDG_STATE_HOME/flk/bench``, by default
``~/.local/state/flk/bench``. A file holds the newest result of one model on one kind of hardware, as JSON.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flk.errors import UsageError
from flk.spec.fields import IN_IMAGE
from flk.spec.job import Job
from flk.user.files import state_folder, write_whole
from flk_runtime.contract import log_format
from flk_runtime.contract.options import INNER_STRATEGIES, parse_strategy
from flk_runtime.contract.values import dataclass

_GIVEN: Final = 20  # results that travel with a job
_NEEDED: Final = ("model", "hardware", "time")  # of a result, so that others can use it


@dataclass(frozen=True)
class BenchResult:
    """The measurements of the ranks, as plain data."""

    data: Mapping[str, Any]

    @classmethod
    def find(cls, line: str) -> BenchResult | None:
        """Return the result in a line of rank 0's output; None if it has none."""
        _, marker, text = line.partition(log_format.BENCH_MARKER)
        if not marker or not line.startswith(log_format.RANK_PREFIX.format(rank=0)):
            return None
        with contextlib.suppress(ValueError):
            data = json.loads(text)
            if isinstance(data, dict) and isinstance(data.get("strategies"), dict):
                return cls(data)
        return None

    @property
    def fastest(self) -> str | None:
        """The strategy with the shortest step; None if none could be measured."""
        seconds = self._seconds()
        return min(seconds, key=lambda name: seconds[name]) if seconds else None

    def keep(self, folder: Path | None = None) -> Path | None:
        """Write the result in place of an older one; None if it has no key or measured nothing. Raises OSError."""
        if not self._seconds() or any(name not in self.data for name in _NEEDED):
            return None
        folder = folder or _folder()
        hardware = hashlib.sha256(json.dumps(self.data["hardware"], sort_keys=True).encode()).hexdigest()[:12]
        path = folder / f"{hashlib.sha256(str(self.data['model']).encode()).hexdigest()[:16]}-{hardware}.json"
        write_whole(path, json.dumps(self._summary()).encode())
        return path

    def _seconds(self) -> dict[str, float]:
        return {name: each["seconds"] for name, each in self.data["strategies"].items() if "seconds" in each}

    def _summary(self) -> dict[str, Any]:
        """Return the part of the result that strategy auto reads."""
        return {name: self.data[name] for name in _NEEDED} | {"seconds": self._seconds()}


def kept_results(folder: Path | None = None) -> list[dict[str, Any]]:
    """Return the kept results, the oldest first. Files that cannot be read are left out."""
    found = []
    for path in (folder or _folder()).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            result = json.loads(path.read_text())
            found.append((float(result["time"]), result))
    return [result for _, result in sorted(found, key=lambda each: each[0])]


def measured(job: Job, folder: Path | None = None) -> list[dict[str, Any]]:
    """Return the newest kept results that were measured on as many nodes and ranks as ``job`` has."""
    shape = {"nodes": job.replicas, "ranks": job.processes_per_pod}
    found = [each for each in kept_results(folder) if shape.items() <= each.get("hardware", {}).items()]
    return found[-_GIVEN:]


def _folder() -> Path:
    return state_folder() / "bench"


def bench_job(job: Job, strategies: Sequence[str], *, root: Path, steps: int, timeout: int) -> Job:
    """Return a job that measures ``strategies`` with the script of ``job``, below ``root``, in the same number of pods.

    Without ``strategies`` the job measures all that differ in these pods. ``steps`` are measured, after the warm-up;
    each strategy may take ``timeout`` seconds. Raises UsageError if a strategy cannot be measured.
    """
    names = []
    for text in strategies:
        try:
            names.append(parse_strategy(text))
        except ValueError as error:
            raise UsageError(f"--strategies: {error}") from None
        if names[-1] not in INNER_STRATEGIES:
            known = ", ".join(INNER_STRATEGIES)
            raise UsageError(f"--strategies: {text} cannot be measured: expected some of {known}")
    request = json.dumps({"strategies": names, "steps": steps, "timeout": timeout})
    command, ship = job.command, job.ship
    if ship not in IN_IMAGE and command[0] != "-m":
        script = root / command[0]  # which is absolute where the command is
        place = os.path.relpath(os.path.realpath(script.parent), os.path.realpath(root))
        command = [os.path.normpath(os.path.join(place, script.name)), *command[1:]]
        ship = [*(ship if isinstance(ship, list) else []), glob.escape(command[0])]
    return job.changed(
        name=f"flk-bench-{secrets.token_hex(3)}",
        command=["-m", "flk_plan.bench", request, *command],
        ship=ship,
        strategy="ddp",
        diloco=None,
        elastic=None,
        spares=0,
        checkpoint=None,
        restarts=0,
        disruptions=0,
    )
