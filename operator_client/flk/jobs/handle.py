"""JobHandle: one job for Python programs, with methods that have the names of the commands."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flk.errors import JobNotFoundError
from flk.jobs import lifecycle, logs, wait
from flk.jobs.answer import look
from flk.jobs.listing import list_states
from flk.jobs.state import State
from flk.observe.client import JobClient, JobRef

if TYPE_CHECKING:
    from flk.health import Diagnosis


@dataclass(frozen=True, repr=False)
class JobHandle:
    """A job in a cluster. All methods are about the job with this ``uid``, and not about another one of its name."""

    client: JobClient
    name: str
    uid: str | None = None

    def __repr__(self) -> str:
        return f"JobHandle({self.name!r}, namespace={self.namespace!r})"

    @property
    def _own(self) -> JobClient:
        """A client for which the job's name means this job only."""
        return self.client.for_job(replace(self.client.ref(self.name), uid=self.uid or ""))

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return self.client.namespace

    def status(self) -> State:
        """Return the job's state now. Raises JobNotFoundError if there is no such job."""
        return look(self._own, self.name).state

    def why(self) -> Diagnosis:
        """Return why the job does not run, or why it ended. Raises JobNotFoundError if there is no such job."""
        return look(self._own, self.name).report

    def wait(self, timeout: float | None = None, *, check: bool = True) -> State:
        """Return the job's state once it has succeeded.

        Raises JobFailedError if it has failed, JobDeletedError if it was deleted before it had ended, JobStuckError
        once it cannot go on, and WaitTimeoutError if it has not ended within ``timeout`` seconds. Without ``check``,
        the state is returned in all cases but the last.
        """
        waited = wait.wait_for(self._own, self.name, uid=self.uid, timeout=timeout)
        if check or waited.outcome == wait.Outcome.TIMEOUT:
            wait.raise_for_state(waited.state, self.client, waited.outcome, timeout)
        return waited.state

    def logs(self, follow: bool = True) -> Iterator[str]:
        """Yield the lines that the ranks print until the job ends or is stuck; without ``follow`` those so far.

        If the job is gone, yields the lines that flk has kept; then JobDeletedError is raised.

        What flk notes about the logs, such as pods whose lines may be missing, is left out: `flk logs` prints it.
        """
        own, read = self._own, logs.dump
        if follow:
            with contextlib.suppress(JobNotFoundError):  # of a job that is gone, the lines that are kept are read
                own.get_job(self.name)
                read = logs.follow
        yield from (line.text for line in read(own, self.name, logs.LogOptions()) if not line.note)

    def suspend(self, timeout: float | None = None, *, lose_progress: bool = False) -> None:
        """Delete the job's pods, after they could save, and keep the job. Returns when they are gone.

        Raises UsageError if the job has ended or Kueue manages it, or if only the memory of its pods has its
        checkpoints, unless with ``lose_progress``, and WaitTimeoutError if pods are left after ``timeout`` seconds.
        """
        lifecycle.suspend(
            self._own, self.name, wait=True, timeout=timeout, report=lambda text: None, lose_progress=lose_progress
        )

    def resume(self) -> None:
        """Let a suspended job start again, at its last checkpoint. Raises UsageError as `suspend` does."""
        lifecycle.resume(self._own, self.name)

    def delete(self) -> None:
        """Delete the job with its pods, ConfigMaps and checkpoints in memory. Returns before the pods are gone."""
        self._own.delete_job(self.name, self.uid)


def get(name: str, *, namespace: str | None = None, context: str | None = None) -> JobHandle:
    """Return a handle on the job of that name, or of that kind and name: ``job.batch/gpt``.

    Raises JobNotFoundError if there is none, UsageError for a name that no job has.
    """
    ref = JobRef.parse(name)
    client = JobClient.connect(context, namespace).for_job(ref)
    return JobHandle(client, ref.name, client.get_job(ref.name)["metadata"]["uid"])


def list(
    *, namespace: str | None = None, all_namespaces: bool = False, context: str | None = None
) -> builtins.list[State]:
    """Return the states of all jobs of a namespace, or of all namespaces, the newest last."""
    return list_states(JobClient.connect(context, namespace), all_namespaces=all_namespaces)
