"""Delete jobs by name or by their properties, and wait until their pods are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from flk import labels
from flk.errors import FlkError, JobNotFoundError
from flk.jobs.lifecycle.suspension import watch_pods_end
from flk.jobs.listing import ListedJob, in_parallel, is_of, list_observed
from flk.jobs.state import Phase
from flk.observe.client import JobClient, JobRef
from flk.targets import TARGETS, target_of

_ENDED: Final = (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True)
class Selection:
    """Which jobs of a namespace to delete: a job has to meet every condition that is set."""

    selector: str | None = None  # of labels, as kubectl's
    finished: bool = False  # only jobs that have succeeded or failed
    older_than: float | None = None  # seconds since the job ended, or since its creation if it has not
    user: str = ""  # the user of the cluster who submitted it; empty: any
    owner: str = ""  # and, since several people may be one user of a cluster, from where: ``user@host``

    def chosen(self, client: JobClient, note: Callable[[str], None]) -> list[JobRef]:
        """Return the chosen jobs, the oldest first. ``note`` says how many of the user's are from elsewhere."""
        selector = ",".join(filter(None, (labels.JOB, self.selector)))
        listed = list_observed(client, selector=selector)
        kinds = {target.kind: target for target in TARGETS.values()}
        chosen = [each.state for each in listed if self._chooses(each, client.now())]
        elsewhere = [state for state in chosen if self.owner not in ("", state.owner)]
        if elsewhere:
            names = ", ".join(state.name for state in elsewhere)
            note(f"left alone, since another person may be {self.user} there: {names}; delete them by their names")
        return [JobRef(state.name, kinds[state.kind], state.uid) for state in chosen if state not in elsewhere]

    def _chooses(self, listed: ListedJob, now: float) -> bool:
        state = listed.state
        ended = state.phase in _ENDED
        if state.phase == Phase.TERMINATING or (self.finished and not ended):
            return False
        if self.user and not is_of(self.user, listed.seen.job):
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
