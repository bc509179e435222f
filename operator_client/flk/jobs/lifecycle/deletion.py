"""Delete jobs, and wait until nothing of them is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flk.errors import FlkError, JobNotFoundError, WaitTimeoutError
from flk.jobs.client import JobClient
from flk.jobs.follower import Follower
from flk.units import plural

REPORT_EVERY: Final = 5.0  # seconds between two reports of what is awaited


def delete_jobs(
    client: JobClient, names: Sequence[str], *, wait: bool, timeout: float | None, report: Callable[[str], None]
) -> Iterator[tuple[str, bool]]:
    """Delete all jobs at once, then yield each name and whether the job existed; with ``wait`` once its pods are gone.

    An error of one job is raised after the others were yielded. Raises WaitTimeoutError if pods are left after
    ``timeout`` seconds. ``report`` is called with a line while flk waits.
    """
    until = None if timeout is None else time.monotonic() + timeout
    uids: dict[str, str] = {}
    failure: FlkError | None = None
    for name in names:
        try:
            uid = client.get_job(name)["metadata"]["uid"]
            client.delete_job(name, uid)
            uids[name] = uid
        except JobNotFoundError:
            yield name, False
        except FlkError as error:
            failure = failure or error
    for name, uid in uids.items():
        if wait:
            _wait_until_gone(client, name, uid, until, report)
        yield name, True
    if failure is not None:
        raise failure


def _wait_until_gone(
    client: JobClient, name: str, uid: str, until: float | None, report: Callable[[str], None]
) -> None:
    reported = time.monotonic()
    with Follower(client, name, uid) as follower:
        for seen in follower.updates(interval=0.5):
            if seen.job is None and not seen.pods:
                return
            now, left = time.monotonic(), len(seen.pods)
            if until is not None and now >= until:
                raise WaitTimeoutError(
                    f"job {name} is being deleted and not gone yet: {plural(left, 'pod')} left",
                    hint="a pod on a node that does not answer stays until the node is removed or is back",
                )
            if now - reported > REPORT_EVERY:
                reported = now
                report(f"waiting for {plural(left, 'pod')} of {name} to end")
