"""Start the pods of a job briefly, without its script, to test what reading objects of the API cannot show.

The ranks of `flk_runtime.check` meet and do one all-reduce. That needs the operator, a node for each pod, the image
with Python and torch, the volumes, the names of the pods, and the network between them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flk.errors import FlkError, WaitTimeoutError
from flk.health.cluster import Level, Result
from flk.jobs.state import Phase
from flk.jobs.submission import prepare
from flk.local.run import as_check
from flk.observe.client import JobClient
from flk.spec.job import Job
from flk.units import short_duration
from flk_runtime.contract.ranges import plural

TIMEOUT: Final = 300.0  # seconds, in which an image can be pulled


def trial(job: Job, root: Path, client: JobClient, *, timeout: float | None, report: Callable[[str], None]) -> Result:
    """Run the check of a start in the pods of ``job``, delete them again, and return what happened.

    ``report`` is called with a line before the pods are created. Raises ApiError if the job cannot be created.
    """
    check = as_check(job).changed(name=f"flk-doctor-{secrets.token_hex(3)}", queue=None)
    report(f"starting {plural(job.replicas, 'pod')} for a moment as job {check.name}")
    handle = prepare(check, root, client).create()
    began = time.monotonic()
    try:
        state = handle.wait(TIMEOUT if timeout is None else timeout, check=False)
    except WaitTimeoutError as error:
        found = f"the ranks of {plural(job.replicas, 'pod')} did not meet: {error}"
        return Result("start", Level.FAILED, found, "`flk doctor` without --start-pods shows what else is wrong")
    finally:
        _delete(handle.delete, report)
    took = short_duration(time.monotonic() - began)
    if state.phase == Phase.SUCCEEDED:
        ranks = plural(job.world_size, "rank")
        return Result(
            "start", Level.OK, f"{ranks} in {plural(job.replicas, 'pod')} met and did an all-reduce, after {took}"
        )
    remedy = state.cause.remedy if state.cause else "`flk doctor` without --start-pods shows what else is wrong"
    return Result("start", Level.FAILED, f"the ranks could not start: {state.headline}", remedy)


def _delete(delete: Callable[[], None], report: Callable[[str], None]) -> None:
    try:
        delete()
    except FlkError as error:
        report(f"the pods could not be deleted again: {error}")
