"""Watch the pods of jobs end, with a deadline and reports, as deletion and suspension both do."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flk.errors import FlkError, JobNotFoundError, WaitTimeoutError
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import Follower
from flk.observe.observation import Observation
from flk_runtime.contract.ranges import plural

REPORT_EVERY: Final = 5.0  # seconds between two reports while flk waits


def watch_pods_end(
    client: JobClient,
    jobs: Sequence[JobRef],
    *,
    until: float | None,
    report: Callable[[str], None],
    awaited: str,
    overdue: str,
    is_done: Callable[[JobRef, Observation], bool],
    pods_left: Callable[[Observation], Sequence[Object]] = lambda seen: seen.pods,
) -> Iterator[tuple[JobRef, FlkError | None]]:
    """Yield the jobs in their order, each when ``is_done`` says so of it, or with the error that it raises.

    ``report`` is called periodically with the number of ``pods_left`` and ``awaited``, what they still do. The error of
    a job that is not done once time.monotonic() has reached ``until`` is WaitTimeoutError, and an error of the watches
    is that of each of their jobs; these begin with ``overdue``, which has a place ``{name}`` for the name of the job.
    A job that does not exist any more is done.
    """
    reported, are_several = time.monotonic(), len(jobs) > 1
    results: dict[JobRef, FlkError | None] = {}
    left = dict.fromkeys(jobs, 0)  # pods, of the jobs that are not done
    with Follower(client, jobs) as follower:
        results.update(_ends(follower, overdue))
        for seen in follower.updates(until):
            results.update(_ends(follower, overdue))
            for job, each in seen.items():
                left[job] = len(pods_left(each))
                try:
                    if not is_done(job, each):
                        continue
                    results[job] = None
                except FlkError as error:
                    results[job] = error
                follower.drop(job)
            now, going_on = time.monotonic(), [job for job in jobs if job in follower]
            if until is not None and now >= until:
                for job in going_on:
                    late = _late(f"{plural(left[job], 'pod')} left")
                    results[job] = _begun_with(overdue.format(name=job.name), late)
                    follower.drop(job)
            elif going_on and now - reported > REPORT_EVERY:
                reported, pods = now, sum(left[job] for job in going_on)
                whose = plural(len(going_on), "job") if are_several else going_on[0].name
                report(f"waiting for {plural(pods, 'pod') + ' of ' if pods else ''}{whose} to {awaited}")
            while jobs and jobs[0] in results:
                yield jobs[0], results[jobs[0]]
                jobs = jobs[1:]
        results.update(_ends(follower, overdue))
    yield from ((job, results[job]) for job in jobs)


def _ends(follower: Follower, overdue: str) -> dict[JobRef, FlkError | None]:
    """Return the results of the jobs that are not followed any more: of those that do not exist, no error."""
    return {
        job: None if isinstance(error, JobNotFoundError) else _begun_with(overdue.format(name=job.name), error)
        for job, error in follower.take_errors().items()
    }


def _begun_with(overdue: str, error: FlkError) -> FlkError:
    """Return the error with what goes on all the same before its text."""
    told = copy.copy(error)
    told.args = (f"{overdue}: {error}",)
    return told


def _late(text: str) -> WaitTimeoutError:
    return WaitTimeoutError(
        text, hint="a pod on a node that does not answer stays until the node is removed or is back"
    )
