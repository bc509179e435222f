"""The job that measures strategies: the ranks run `flk_plan.bench`, which runs the script once for each of them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from flk.errors import UsageError
from flk.spec.job import Job
from flk_runtime.contract.options import INNER_STRATEGIES, parse_strategy


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
