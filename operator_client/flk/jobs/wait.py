"""The state of a job now, and until it ends: what pods, events and logs must be asked for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from flk.errors import FlkError, JobDeletedError, JobFailedError, JobRunningError, WaitTimeoutError
from flk.jobs import state as states
from flk.jobs.client import JobClient
from flk.jobs.follower import Follower, Snapshot, owned_by
from flk.jobs.state import Phase, State
from flk.kube.resources import Object
from flk.units import short_duration, timestamp
from flk_runtime import contract
from flk_runtime.contract import JobRecord

STUCK_AFTER: Final = 10.0  # seconds in which a pod may be starting before its events are asked for the reason
STUCK_PODS: Final = 3  # pods whose events are read, so that a thousand that hang alike cost three requests
LAST_WORDS: Final = 5.0  # seconds that the pods of a failed job get to say why, after the first has ended
EVENTS_EVERY: Final = 5.0  # seconds between two looks at the events of a job that does not start
RECORD_AFTER: Final = (1.0, 10.0)  # seconds after which the record is read again: when pods have changed, and anyway
_LOG_IDLE: Final = 5.0


def look(cluster: JobClient, name: str) -> State:
    """The state of a job now. JobNotFoundError if there is none."""
    job = cluster.job(name)
    pods = [pod for pod in cluster.pods(name) if owned_by(pod, job["metadata"]["uid"])]
    return _derive(cluster, Snapshot(job, pods))


def until_end(
    cluster: JobClient,
    name: str,
    *,
    uid: str | None = None,
    timeout: float | None = None,
    tell: Callable[[State], None] = lambda state: None,
) -> State:
    """Follow a job until it ends, or ``timeout`` seconds are over: the last state then is not final.

    ``tell`` is called with every state whose headline or attempt is new.
    """
    told: tuple[str, int] | None = None
    current: State | None = None
    failed_at: float | None = None
    for current in _states(cluster, name, uid, timeout):
        if (current.headline, current.restarts) != told and not current.final:
            told = (current.headline, current.restarts)
            tell(current)
        if current.final:
            # The first pod of a job to end may not be the one that knows why: the others' last words are on the way.
            failed_at = failed_at or time.monotonic()
            still = any(pod.exit_code is None and pod.phase == "Running" for pod in current.pods)
            if current.phase == Phase.FAILED and still and time.monotonic() - failed_at < LAST_WORDS:
                continue
            break
    assert current is not None  # noqa: S101 - the follower raises before it shows nothing
    return current


def _states(cluster: JobClient, name: str, uid: str | None, timeout: float | None) -> Iterator[State]:
    """The states of a job, at least one a second. Ends when it is deleted, and when the time is over."""
    until = None if timeout is None else time.monotonic() + timeout
    events = _Events(cluster)
    last: State | None = None
    with Follower(cluster, name, uid) as follower:
        for snapshot in follower.snapshots():
            if snapshot.job is None:
                if last is None:
                    last = State(name, cluster.namespace, uid or "", Phase.PENDING, int(contract.ExitCode.RUNNING))
                yield states.deleted(last, replaced=snapshot.replaced, now=cluster.now())
                return
            last = _derive(cluster, snapshot, events)
            yield last
            if until is not None and time.monotonic() >= until:
                return


class _Events:
    """Events and the launcher's record, asked for only where they can tell something new."""

    def __init__(self, cluster: JobClient) -> None:
        self.cluster = cluster
        self._asked = -EVENTS_EVERY
        self._events: list[Object] = []
        self._pods: tuple[str, ...] = ()
        self._record: JobRecord | None = None
        self._read = -RECORD_AFTER[1]

    def events(self, snapshot: Snapshot, now: float) -> list[Object]:
        """The events of the job and of pods that hang, at most one look in some seconds."""
        if time.monotonic() - self._asked >= EVENTS_EVERY:
            self._events = _events(self.cluster, snapshot, now)
            self._asked = time.monotonic()
        return self._events

    def record(self, snapshot: Snapshot) -> JobRecord | None:
        """The record in the log, read again when a pod was made or ended, and now and then: attempts need neither."""
        pods = tuple(sorted(f"{pod['metadata']['uid']} {pod.get('status', {}).get('phase')}" for pod in snapshot.pods))
        age = time.monotonic() - self._read
        if age >= RECORD_AFTER[pods == self._pods and self._record is not None]:
            self._pods, self._record, self._read = pods, _record(self.cluster, snapshot), time.monotonic()
        return self._record


def _derive(cluster: JobClient, snapshot: Snapshot, seen: _Events | None = None) -> State:
    assert snapshot.job is not None  # noqa: S101
    now = cluster.now()
    seen = seen or _Events(cluster)
    plain = states.derive(snapshot.job, snapshot.pods, now=now, former=snapshot.former)
    if plain.phase in (Phase.SUCCEEDED, Phase.QUEUED, Phase.STOPPING):
        return plain
    if plain.phase == Phase.FAILED and plain.failure and plain.attempts and plain.failure.kind != "lost":
        return plain
    record = seen.record(snapshot) if not (plain.attempts and plain.final) else None
    calm = plain.phase == Phase.RUNNING and not plain.restarts and not snapshot.former
    events = [] if calm else seen.events(snapshot, now)
    return states.derive(snapshot.job, snapshot.pods, now=now, events=events, record=record, former=snapshot.former)


def _events(cluster: JobClient, snapshot: Snapshot, now: float) -> list[Object]:
    assert snapshot.job is not None  # noqa: S101
    found = cluster.events("PyTorchJob", snapshot.job["metadata"]["name"])
    uid = snapshot.job["metadata"]["uid"]
    found = [event for event in found if (event.get("involvedObject") or {}).get("uid") in (None, uid)]
    hanging = [
        pod
        for pod in snapshot.pods
        if (pod.get("status") or {}).get("phase") == "Pending"
        and now - timestamp(pod["metadata"].get("creationTimestamp")) > STUCK_AFTER
    ]
    for pod in hanging[:STUCK_PODS]:
        found += cluster.events("Pod", pod["metadata"]["name"])
    return found


def _record(cluster: JobClient, snapshot: Snapshot) -> JobRecord | None:
    """The last record in the log of pod 0, which tells the attempts of a running job. Not having it is no error."""
    first = [p for p in snapshot.pods if p["metadata"]["name"].endswith(("-worker-0", "-master-0"))]
    if not first or not (first[0].get("status") or {}).get("containerStatuses"):
        return None
    record = None
    try:
        tail = contract.RECORD_INTERVAL + 100
        with cluster.log(first[0]["metadata"]["name"], _LOG_IDLE, tailLines=tail) as lines:
            for line in lines:
                if contract.RECORD_MARKER.encode() in line:
                    record = contract.parse_record(line.decode(errors="replace")) or record
    except FlkError:
        return record
    return record


def describe(state: State) -> str:
    """One line on what a job does, for people who wait."""
    line = f"{state.name} is {state.headline}"
    if state.phase == Phase.RUNNING:
        line += f", {state.ready} of {state.replicas} pods"
        if len(state.attempts) > 1:
            line += f", attempt {state.restarts + 1} after: {state.attempts[-2].cause}"
    elif not state.final and not state.reason:
        line += f", {state.ready} of {state.replicas} pods are running"
    return line


def took(state: State) -> str:
    """How long it ran, and in how many attempts."""
    if not state.started or not state.ended:
        return ""
    attempts = f" and {state.restarts + 1} attempts" if state.restarts else ""
    return f" after {short_duration(state.ended - state.started)}{attempts}"


def conclude(state: State, timeout: float | None = None) -> None:
    """Return if the job has succeeded; raise what else there is to say, with the exit code of the contract."""
    name, where = state.name, f" -n {state.namespace}"
    if state.phase == Phase.SUCCEEDED:
        return
    if state.phase == Phase.FAILED:
        failure = state.failure
        rank = f" --rank {failure.rank}" if failure and failure.rank is not None else ""
        raise JobFailedError(
            f"job {name} failed{took(state)}: {state.message or 'the operator gives no reason'}",
            hint=f"flk status {name}{where} tells more; flk logs {name}{where}{rank} shows what was printed",
            code=contract.ExitCode(state.code),
        )
    if state.phase == Phase.DELETED:
        raise JobDeletedError(f"job {name} is gone: {state.message}")
    if timeout == 0:
        raise JobRunningError(f"job {describe(state)}", hint=f"flk wait {name}{where} waits for its end")
    raise WaitTimeoutError(
        f"job {describe(state)}, after {short_duration(timeout or 0)} of waiting",
        hint=f"it goes on; flk wait {name}{where} waits again",
    )
