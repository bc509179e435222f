"""JobHandle: the state, the logs, the end and the deletion of one job, for Python programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flk.errors import WaitTimeoutError
from flk.jobs import lifecycle, logs, wait
from flk.jobs.listing import list_states
from flk.jobs.state import State
from flk.observe.client import JobClient, JobRef


@dataclass(frozen=True)
class JobHandle:
    """A job in a cluster. All methods are about the job with this ``uid``, and not about another one of its name."""

    client: JobClient
    name: str
    uid: str | None = None

    @property
    def _own(self) -> JobClient:
        """A client for which the job's name means this job only."""
        return self.client.of(JobRef(self.name, uid=self.uid or ""))

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return self.client.namespace

    def status(self) -> State:
        """Return the job's state now. Raises JobNotFoundError if there is no such job."""
        return wait.get_state(self._own, self.name)

    def wait(self, timeout: float | None = None, *, fail_fast: bool = True) -> State:
        """Return the job's state once it has ended, well or badly, or (with ``fail_fast``) once it is stuck.

        Raises WaitTimeoutError if neither is so within ``timeout`` seconds.
        """
        waited = wait.wait_for(self._own, self.name, uid=self.uid, timeout=timeout, fail_fast=fail_fast)
        if waited.outcome == wait.Outcome.TIMEOUT:
            raise WaitTimeoutError(f"the wait ended after {timeout:g} s: job {wait.describe(waited.state)}")
        return waited.state

    def logs(self, follow: bool = True) -> Iterator[str]:
        """Yield the lines that the ranks print until the job ends, or without ``follow`` those that are there now."""
        read = logs.follow if follow else logs.dump
        return (line.text for line in read(self._own, self.name, logs.LogOptions()) if not line.note)

    def scale(self, pods: int) -> None:
        """Give an elastic job ``pods`` pods, which its launchers admit or let go at a step boundary. Returns at once.

        Raises UsageError if the job is not elastic, has ended, is in a queue or may not have as many.
        """
        lifecycle.scale(self._own, self.name, pods)

    def suspend(self, timeout: float | None = None) -> None:
        """Delete the job's pods, after they could save, and keep the job. Returns when they are gone.

        Raises UsageError if the job has ended or Kueue manages it, WaitTimeoutError if pods are left after ``timeout``
        seconds.
        """
        lifecycle.suspend(self._own, self.name, wait=True, timeout=timeout, report=lambda text: None)

    def resume(self) -> None:
        """Let a suspended job start again, at its last checkpoint. Raises UsageError as `suspend` does."""
        lifecycle.resume(self._own, self.name)

    def delete(self) -> None:
        """Delete the job with its pods and ConfigMaps. Returns before the pods are gone."""
        self._own.delete_job(self.name, self.uid)


def get(name: str, *, namespace: str | None = None, context: str | None = None) -> JobHandle:
    """Return a handle on the job of that name. Raises JobNotFoundError if there is none."""
    client = JobClient.connect(context, namespace)
    return JobHandle(client, name, client.get_job(name)["metadata"]["uid"])


def list_jobs(*, namespace: str | None = None, all_namespaces: bool = False, context: str | None = None) -> list[State]:
    """Return the states of all jobs of a namespace, or of all namespaces, the newest last."""
    return list_states(JobClient.connect(context, namespace), all_namespaces=all_namespaces)
