"""Get the state of a job now, or follow it until it ends: which pods, events and logs are read for that, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Final

from flk.errors import FlkError, JobDeletedError, JobFailedError, JobRunningError, WaitTimeoutError
from flk.jobs.client import JobClient
from flk.jobs.evidence import Recorder
from flk.jobs.evidence.tails import TailReader
from flk.jobs.follower import Follower, ObservedJob, is_owned_by
from flk.jobs.state import Phase, PodPhase, State, deleted, derive
from flk.kube import Object
from flk.units import short_duration, timestamp
from flk_runtime import contract
from flk_runtime.contract import JobRecord

STUCK_AFTER: Final = 10.0  # seconds in which a pod may be pending before its events are read
STUCK_PODS: Final = 3  # pods whose events are read, so that a thousand pending ones cost three requests
FAILURE_DELAY: Final = 5.0  # seconds that pods of a failed job get to leave a record, after the first has ended
EVENTS_EVERY: Final = 5.0  # seconds between two requests for the events of a job that does not start
RECORD_EVERY: Final = 1.0  # seconds between two requests for the record when pods have changed
RECORD_REFRESH: Final = 10.0  # the same when they have not: a new attempt need not change a pod
_TAILS: Final = 10.0  # seconds in which the last lines of the pods must have been read
_LOG_IDLE: Final = 5.0  # seconds without a byte of the log after which the record is given up


def get_state(client: JobClient, name: str) -> State:
    """Return the state of a job now. Raises JobNotFoundError if there is none."""
    job = client.get_job(name)
    pods = [pod for pod in client.list_pods(name) if is_owned_by(pod, job["metadata"]["uid"])]
    return _derive(client, ObservedJob(job, pods), _Reader(client))


def wait_until_finished(
    client: JobClient,
    name: str,
    *,
    uid: str | None = None,
    timeout: float | None = None,
    report: Callable[[State], None] = lambda state: None,
    note: Callable[[str], None] = lambda text: None,
) -> State:
    """Follow a job and return its last state: finished, or after ``timeout`` seconds perhaps not.

    ``report`` is called with every state whose headline or attempt is new, ``note`` with what flk says of itself.
    """
    reported: tuple[str, int] | None = None
    current: State | None = None
    failed_at: float | None = None
    with closing(_states(client, name, uid, timeout, note)) as states:
        for current in states:
            if (current.headline, current.restarts) != reported and not current.finished:
                reported = (current.headline, current.restarts)
                report(current)
            if current.finished:
                # The first pod that ends may not know the cause. Wait a moment for the records of the others.
                failed_at = failed_at or time.monotonic()
                running = any(pod.exit_code is None and pod.phase == PodPhase.RUNNING for pod in current.pods)
                if current.phase == Phase.FAILED and running and time.monotonic() - failed_at < FAILURE_DELAY:
                    continue
                break
    assert current is not None  # noqa: S101 - without a state the follower raises
    return current


def describe(state: State) -> str:
    """Return one line about a job's state for people who wait."""
    line = f"{state.name} is {state.headline}"
    if state.phase == Phase.RUNNING:
        line += f", {state.ready} of {state.replicas} pods"
        if len(state.attempts) > 1:
            line += f", attempt {state.restarts + 1} after: {state.attempts[-2].cause}"
    elif not state.finished and not state.reason:
        line += f", {state.ready} of {state.replicas} pods are running"
    return line


def run_time_text(state: State) -> str:
    """Return how long a finished job ran and in how many attempts: `` after 5m and 2 attempts``; empty if unknown."""
    if not state.started or not state.ended:
        return ""
    attempts = f" and {state.restarts + 1} attempts" if state.restarts else ""
    return f" after {short_duration(state.ended - state.started)}{attempts}"


def raise_for_state(state: State, client: JobClient, timeout: float | None = None) -> None:
    """Return if the job has succeeded; else raise the error that has the exit code of the contract.

    ``timeout`` is the time in seconds that flk has waited for a job that has not finished.
    """
    name = state.name
    if state.phase == Phase.SUCCEEDED:
        return
    if state.phase == Phase.FAILED:
        rank = f" --rank {state.failure.rank}" if state.failure and state.failure.rank is not None else ""
        raise JobFailedError(
            f"job {name} failed{run_time_text(state)}: {state.message or 'the operator gives no reason'}",
            hint=f"{client.command('status', name)} shows more; {client.command('logs', name)}{rank} shows what was "
            "printed",
            code=contract.ExitCode(state.code),
        )
    if state.phase == Phase.DELETED:
        raise JobDeletedError(f"job {name} is gone: {state.message}")
    if timeout == 0:
        raise JobRunningError(f"job {describe(state)}", hint=f"{client.command('wait', name)} waits for its end")
    raise WaitTimeoutError(
        f"the wait ended after {short_duration(timeout or 0)}: job {describe(state)}",
        hint=f"the job goes on; {client.command('wait', name)} waits again",
    )


def _states(
    client: JobClient, name: str, uid: str | None, timeout: float | None, note: Callable[[str], None]
) -> Generator[State, None, None]:
    """Yield the states of a job, at least one a second. Ends when it was deleted, and when the time is over.

    What is seen is kept as evidence.
    """
    until = None if timeout is None else time.monotonic() + timeout
    reader, recorder = _Reader(client), Recorder(client, note=note)
    tails = TailReader(client, recorder)
    last: State | None = None
    try:
        with Follower(client, name, uid) as follower:
            for seen in follower.updates():
                if seen.job is None:
                    if last is None:
                        last = State(name, client.namespace, uid or "", Phase.PENDING, int(contract.ExitCode.RUNNING))
                    last = deleted(last, name_reused=seen.name_reused, now=client.now())
                    recorder.observe(seen, state=last)
                    yield last
                    return
                last = _derive(client, seen, reader)
                recorder.observe(seen, events=reader.last_events, record=reader.last_record, state=last)
                tails.consider(seen.pods)
                yield last
                if until is not None and time.monotonic() >= until:
                    return
    finally:
        tails.close(_TAILS)
        recorder.close()


class _Reader:
    """The events and the launcher's record of a job, which are read only where they can add something."""

    def __init__(self, client: JobClient) -> None:
        self.client = client
        self.last_events: list[Object] = []  # as they were read last, as `last_record`
        self.last_record: JobRecord | None = None
        self._events_read = -EVENTS_EVERY
        self._pods: tuple[str, ...] = ()
        self._record_read = -RECORD_REFRESH

    def events(self, seen: ObservedJob, now: float) -> list[Object]:
        """Return the events of the job and of pending pods, read again after some seconds."""
        if time.monotonic() - self._events_read >= EVENTS_EVERY:
            self.last_events = _read_events(self.client, seen, now)
            self._events_read = time.monotonic()
        return self.last_events

    def record(self, seen: ObservedJob) -> JobRecord | None:
        """Return the record in the log of pod 0, read again soon after a pod has changed, and now and then."""
        pods = tuple(sorted(f"{pod['metadata']['uid']} {pod.get('status', {}).get('phase')}" for pod in seen.pods))
        unchanged = pods == self._pods and self.last_record is not None
        if time.monotonic() - self._record_read >= (RECORD_REFRESH if unchanged else RECORD_EVERY):
            self._pods, self.last_record = pods, _read_record(self.client, seen)
            self._record_read = time.monotonic()
        return self.last_record


def _derive(client: JobClient, seen: ObservedJob, reader: _Reader) -> State:
    assert seen.job is not None  # noqa: S101
    now = client.now()
    state = derive(seen.job, seen.pods, now=now, replaced_pods=seen.replaced_pods)
    if state.phase in (Phase.SUCCEEDED, Phase.SUSPENDED, Phase.TERMINATING):
        return state
    if state.phase == Phase.FAILED and state.failure and state.attempts and state.failure.kind != "lost":
        return state
    record = None if state.attempts and state.finished else reader.record(seen)
    undisturbed = state.phase == Phase.RUNNING and not state.restarts and not seen.replaced_pods
    events = [] if undisturbed else reader.events(seen, now)
    return derive(seen.job, seen.pods, now=now, events=events, record=record, replaced_pods=seen.replaced_pods)


def _read_events(client: JobClient, seen: ObservedJob, now: float) -> list[Object]:
    assert seen.job is not None  # noqa: S101
    uid = seen.job["metadata"]["uid"]
    events = client.list_events("PyTorchJob", seen.job["metadata"]["name"])
    events = [event for event in events if (event.get("involvedObject") or {}).get("uid") in (None, uid)]
    pending = [
        pod
        for pod in seen.pods
        if (pod.get("status") or {}).get("phase") == "Pending"
        and now - timestamp(pod["metadata"].get("creationTimestamp")) > STUCK_AFTER
    ]
    for pod in pending[:STUCK_PODS]:
        events += client.list_events("Pod", pod["metadata"]["name"])
    return events


def _read_record(client: JobClient, seen: ObservedJob) -> JobRecord | None:
    """Return the last record in the log of pod 0, which lists the attempts of a running job; None if there is none."""
    first = [p for p in seen.pods if p["metadata"]["name"].endswith(("-worker-0", "-master-0"))]
    if not first or not (first[0].get("status") or {}).get("containerStatuses"):
        return None
    record = None
    try:
        tail = contract.RECORD_INTERVAL + 100
        with client.stream_log(first[0]["metadata"]["name"], _LOG_IDLE, tailLines=tail) as lines:
            for line in lines:
                if contract.RECORD_MARKER.encode() in line:
                    record = contract.parse_record(line.decode(errors="replace")) or record
    except FlkError:
        return record
    return record
