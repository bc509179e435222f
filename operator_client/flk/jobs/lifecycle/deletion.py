"""Delete jobs by name or by their properties, and wait until their pods are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flk.errors import FlkError, JobNotFoundError
from flk.jobs.lifecycle.suspension import watch_pods_end
from flk.jobs.listing import in_parallel, list_states
from flk.jobs.state import Phase, State
from flk.observe.client import JobClient, JobRef
from flk.spec import labels
from flk.targets import TARGETS, target_of
from flk_runtime.contract.values import dataclass

_ENDED: Final = (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True)
class Selection:
    """Which jobs of a namespace to delete: a job has to meet every condition that is set."""

    selector: str | None = None  # of labels, as kubectl's
    finished: bool = False  # only jobs that have succeeded or failed
    older_than: float | None = None  # seconds since the job ended, or since its creation if it has not

    def chosen(self, client: JobClient) -> list[JobRef]:
        """Return the chosen jobs, the oldest first."""
        selector = ",".join(filter(None, (labels.JOB, self.selector)))
        kinds = {target.kind: target for target in TARGETS.values()}
        states = list_states(client, selector=selector)
        return [
            JobRef(state.name, kinds[state.kind], state.uid) for state in states if self._chooses(state, client.now())
        ]

    def _chooses(self, state: State, now: float) -> bool:
        ended = state.phase in _ENDED
        if state.phase == Phase.TERMINATING or (self.finished and not ended):
            return False
        since = state.ended if ended and state.ended else state.created
        return self.older_than is None or now - since > self.older_than


def delete_jobs(
    client: JobClient,
    jobs: Sequence[JobRef],
    *,
    wait: bool,
    timeout: float | None,
    report: Callable[[str], None],
    dry_run: bool = False,
) -> Iterator[tuple[JobRef, bool | FlkError]]:
    """Delete all jobs, then yield each and whether it existed, or its error; with ``wait`` once its pods are gone.

    Another job that has the name by then is left alone where the UID is given, and yielded as one that did not exist.
    The error is WaitTimeoutError if pods are left after ``timeout`` seconds. ``report`` is called with a line while
    flk waits. With ``dry_run`` nothing is deleted, and nothing waited for.
    """
    until = None if timeout is None else time.monotonic() + timeout
    deleted: list[JobRef] = []

    def delete(job: JobRef) -> JobRef:
        own = client.for_job(job)
        found = own.get_job(job.name)
        uid = found["metadata"]["uid"]
        if not dry_run:
            own.delete_job(job.name, uid)
        return JobRef(job.name, target_of(found), uid)

    for job, result in in_parallel(jobs, delete):
        if isinstance(result, JobRef):
            deleted.append(result)
        elif isinstance(result, JobNotFoundError):
            yield job, False
        else:
            yield job, result
    if not wait or dry_run:
        yield from ((job, True) for job in deleted)
        return
    watched = watch_pods_end(
        client,
        deleted,
        until=until,
        report=report,
        awaited="end",
        overdue="job {name} is being deleted and not gone yet",
        is_done=lambda job, seen: seen.gone is not None and (seen.name_reused or not seen.pods),
    )
    yield from ((job, error or True) for job, error in watched)
