"""Delete jobs by name or by their properties, and wait until their pods are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from flk import labels
from flk.errors import FlkError, JobNotFoundError
from flk.jobs.lifecycle.ending import watch_pods_end
from flk.jobs.listing import list_states
from flk.jobs.owner import is_user
from flk.jobs.state import Phase, State
from flk.observe.client import JobClient, JobRef
from flk.targets import TARGETS

_ENDED: Final = (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True)
class Selection:
    """Which jobs of a namespace to delete: a job has to meet every condition that is set."""

    selector: str | None = None  # of labels, as kubectl's
    finished: bool = False  # only jobs that have succeeded or failed
    older_than: float | None = None  # seconds since the job ended, or since its creation if it has not
    owner: str = ""  # the user who submitted it; empty: any
    others: bool = False  # also jobs that flk did not make

    def chosen(self, client: JobClient) -> list[JobRef]:
        """Return the chosen jobs, the oldest first."""
        selector = ",".join(filter(None, ("" if self.others else labels.JOB, self.selector)))
        states = list_states(client, selector=selector or None)
        kinds = {target.kind: target for target in TARGETS.values()}
        chosen = [state for state in states if self._chooses(state, client.now())]
        return [JobRef(state.name, kinds[state.kind], state.uid) for state in chosen]

    def _chooses(self, state: State, now: float) -> bool:
        ended = state.phase in _ENDED
        if state.phase == Phase.TERMINATING or (self.finished and not ended):
            return False
        if self.owner and not is_user(self.owner, state.owner):
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
) -> Iterator[tuple[JobRef, bool]]:
    """Delete all jobs at once, then yield each and whether it existed; with ``wait`` once its pods are gone.

    Another job that has the name by then is left alone where the UID is given, and yielded as one that did not exist.
    The first error of a job is raised after the others were yielded, and later ones are reported. Such an error is
    WaitTimeoutError if pods are left after ``timeout`` seconds. ``report`` is called with a line while flk waits, too.
    With ``dry_run`` nothing is deleted, and nothing waited for.
    """
    until = None if timeout is None else time.monotonic() + timeout
    deleted: list[tuple[JobRef, JobClient, str]] = []
    failures: list[FlkError] = []
    for job in jobs:
        own = client.of(job)
        try:
            uid = own.get_job(job.name)["metadata"]["uid"]
            if not dry_run:
                own.delete_job(job.name, uid)
            deleted.append((job, own, uid))
        except JobNotFoundError:
            yield job, False
        except FlkError as error:
            failures.append(error)
    for job, own, uid in deleted:
        try:
            if wait and not dry_run:
                _wait_until_gone(own, job.name, uid, until, report)  # it knows the kind of a job that may be gone
        except FlkError as error:
            failures.append(error)
            continue
        yield job, True
    for failure in failures[1:]:
        report(str(failure))
    if failures:
        raise failures[0]


def _wait_until_gone(
    client: JobClient, name: str, uid: str, until: float | None, report: Callable[[str], None]
) -> None:
    overdue = f"job {name} is being deleted and not gone yet"
    for seen in watch_pods_end(client, (name, uid), until=until, report=report, awaited="end", overdue=overdue):
        if seen.gone is not None and (seen.name_reused or not seen.pods):
            return
