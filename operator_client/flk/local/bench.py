"""Benchmarks of strategies: the job that measures them, and its result. `flk_plan.bench` is the side of the ranks."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flk.errors import UsageError
from flk.spec.job import Job
from flk_runtime.contract import log_format
from flk_runtime.contract.options import INNER_STRATEGIES, parse_strategy


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
        seconds = {name: each["seconds"] for name, each in self.data["strategies"].items() if "seconds" in each}
        return min(seconds, key=lambda name: seconds[name]) if seconds else None


def bench_job(job: Job, strategies: Sequence[str], *, steps: int, timeout: int) -> Job:
    """Return a job that measures ``strategies`` with the script of ``job``, in the same number of pods.

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
    ship = job.ship
    if ship is not False and job.command[0] != "-m":
        ship = [*(ship if isinstance(ship, list) else []), job.command[0]]
    return job.changed(
        name=f"flk-bench-{secrets.token_hex(3)}",
        command=["-m", "flk_plan.bench", request, *job.command],
        ship=ship,
        strategy="ddp",
        diloco=None,
        elastic=None,
        spares=0,
        checkpoint=None,
        restarts=0,
        disruptions=0,
    )
