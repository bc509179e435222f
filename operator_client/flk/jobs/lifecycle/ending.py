"""Watch the pods of a job, or of many, end, with a deadline and reports, as deletion and suspension both do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flk.errors import FlkError, WaitTimeoutError
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import Follower, Followers
from flk.observe.observation import Observation
from flk_runtime.contract.ranges import plural

REPORT_EVERY: Final = 5.0  # seconds between two reports while flk waits


def watch_pods_end(
    client: JobClient,
    job: tuple[str, str],
    *,
    until: float | None,
    report: Callable[[str], None],
    awaited: str,
    overdue: str,
) -> Iterator[Observation]:
    """Yield observations of a job (name and UID) while its pods end, until the caller stops.

    ``report`` is called periodically with the number of pods left and ``awaited``, what they still do. Raises
    WaitTimeoutError, which begins with ``overdue``, once time.monotonic() has reached ``until``.
    """
    reported = time.monotonic()
    with Follower(client, *job) as follower:
        for seen in follower.updates(interval=0.5):
            yield seen
            now, left = time.monotonic(), plural(len(seen.pods), "pod")
            if until is not None and now >= until:
                raise _late(f"{overdue}: {left} left")
            if now - reported > REPORT_EVERY:
                reported = now
                report(f"waiting for {left} of {job[0]} to {awaited}")


def watch_all_pods_end(
    client: JobClient,
    jobs: Sequence[JobRef],
    *,
    until: float | None,
    report: Callable[[str], None],
    awaited: str,
    overdue: str,
    is_done: Callable[[JobRef, Observation], bool],
) -> Iterator[tuple[JobRef, FlkError | None]]:
    """Yield the jobs in their order, each when ``is_done`` says so of it, or with the error that it raises.

    Other arguments are as those of `watch_pods_end`; ``overdue`` has a place ``{name}`` for the name of a job. A job
    that does not exist any more is done.
    """
    reported = time.monotonic()
    results: dict[JobRef, FlkError | None] = {}
    left = dict.fromkeys(jobs, 0)  # pods, of the jobs that are not done
    with Followers(client, jobs) as followers:
        results.update(dict.fromkeys(followers.missing))
        for seen in followers.updates(until):
            for job, each in seen.items():
                left[job] = len(each.pods)
                try:
                    if not is_done(job, each):
                        continue
                    results[job] = None
                except FlkError as error:
                    results[job] = error
                followers.drop(job)
            now, going_on = time.monotonic(), [job for job in jobs if job in followers]
            if until is not None and now >= until:
                for job in going_on:
                    results[job] = _late(f"{overdue.format(name=job.name)}: {plural(left[job], 'pod')} left")
                    followers.drop(job)
            elif now - reported > REPORT_EVERY:
                reported, pods = now, plural(sum(left[job] for job in going_on), "pod")
                report(f"waiting for {pods} of {plural(len(going_on), 'job')} to {awaited}")
            while jobs and jobs[0] in results:
                yield jobs[0], results[jobs[0]]
                jobs = jobs[1:]
    yield from ((job, results[job]) for job in jobs)


def _late(text: str) -> WaitTimeoutError:
    return WaitTimeoutError(
        text, hint="a pod on a node that does not answer stays until the node is removed or is back"
    )
