"""Recorder: collects the evidence of one job while flk follows it, and writes it to the user's state folder."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from flk.jobs.evidence.model import KeptCause, KeptJob, StateChange
from flk.jobs.evidence.redaction import kept_event, kept_job, kept_pod
from flk.jobs.evidence.store import Store
from flk.jobs.state import Phase, PodPhase, State
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.follower import ObservedJob
from flk.targets import target_of
from flk_runtime.contract.record import JobRecord

WRITE_EVERY: Final = 5.0  # seconds between two writes of what has changed
WRITE_SHARE: Final = 20  # and at least so many times what the last write took, for jobs of many pods
MAX_STATES, MAX_EVENTS, MAX_REPLACED = 500, 500, 500  # the newest are kept
MAX_LINES: Final = 20_000  # lines of all pods together
LINES_OF_A_POD: Final = (5, 200)  # fewest and most lines of one pod
LINE_LIMIT: Final = 1000  # characters of a line


class Recorder:
    """Collects what is seen of one job. Several threads may use one recorder.

    A state folder that cannot be written does not disturb the command: ``note`` is called once with the reason.
    """

    def __init__(
        self, client: JobClient, *, store: Store | None = None, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self._client, self._store, self._note = client, store or Store(client), note
        self._lock = threading.Lock()
        self._evidence: KeptJob | None = None
        self._pods: dict[str, Object] = {}
        self._versions: dict[str, str] = {}  # of the objects that are kept, by UID
        self._lines: dict[str, deque[str]] = {}
        self._lines_of_a_pod = LINES_OF_A_POD[1]
        self._changed = False
        self._broken = False
        self._next_write = 0.0

    def observe(
        self,
        seen: ObservedJob,
        *,
        events: Sequence[Object] = (),
        record: JobRecord | None = None,
        state: State | None = None,
    ) -> None:
        """Take over what is new, and write it now and then. A job that is gone stays as it was seen last."""
        with self._lock:
            if seen.job is not None:
                self._take_job(seen.job)
            evidence = self._evidence
            if evidence is None:
                return  # it was gone before it was ever seen
            evidence.updated = self._client.now()
            for pod in seen.pods:
                self._take_pod(pod)
            for name, pod in seen.replaced_pods.items():
                if self._is_new(pod) or name not in evidence.replaced_pods:
                    evidence.replaced_pods[name] = kept_pod(pod)
                    self._changed = True
            while len(evidence.replaced_pods) > MAX_REPLACED:
                del evidence.replaced_pods[next(iter(evidence.replaced_pods))]
            self._take_events(events)
            if record is not None and record != evidence.record:
                evidence.record, self._changed = record, True
            self._take_state(seen, state)
            if self._changed and time.monotonic() >= self._next_write:
                self._write()

    def add_line(self, pod: str, line: str) -> None:
        """Take over a line of a pod's log."""
        with self._lock:
            lines = self._lines.setdefault(pod, deque())
            lines.append(line[:LINE_LIMIT])
            while len(lines) > self._lines_of_a_pod:
                lines.popleft()
            self._changed = True

    def set_lines(self, pod: str, lines: Sequence[str]) -> None:
        """Take over the end of a pod's log in place of what was kept of it."""
        with self._lock:
            self._lines[pod] = deque([line[:LINE_LIMIT] for line in lines[-self._lines_of_a_pod :]])
            self._changed = True

    def close(self) -> None:
        """Write what is new, and delete what is old."""
        with self._lock:
            if self._evidence is not None:
                self._write()  # even if nothing else has changed: when the job was seen last
            if self._evidence is not None and not self._broken:
                try:
                    self._store.prune()
                except OSError as error:
                    self._complain(error)

    def _take_job(self, job: Object) -> None:
        meta = job["metadata"]
        if self._evidence is None:
            kept = self._store.find(meta["name"], meta["uid"])
            self._evidence = kept or KeptJob(kept_job(job))
            self._pods = {pod["metadata"]["name"]: pod for pod in self._evidence.pods}
            for pod, lines in self._evidence.lines.items():
                # Lines that were read meanwhile are newer, and may be the same.
                self._lines.setdefault(pod, deque(lines))
            pods = sum(replicas.count for replicas in target_of(job).replicas(job).values())
            fewest, most = LINES_OF_A_POD
            self._lines_of_a_pod = max(fewest, min(most, MAX_LINES // max(1, pods)))
        if self._is_new(job):
            self._evidence.job, self._changed = kept_job(job), True

    def _take_pod(self, pod: Object) -> None:
        if self._is_new(pod):
            self._pods[pod["metadata"]["name"]] = kept_pod(pod)
            self._changed = True

    def _take_events(self, events: Sequence[Object]) -> None:
        assert self._evidence is not None  # noqa: S101
        new = [event for event in events if self._is_new(event)]
        if new:
            names = {event["metadata"]["name"] for event in new}
            kept = [event for event in self._evidence.events if event["metadata"]["name"] not in names]
            self._evidence.events = [*kept, *map(kept_event, new)][-MAX_EVENTS:]
            self._changed = True

    def _take_state(self, seen: ObservedJob, state: State | None) -> None:
        evidence = self._evidence
        assert evidence is not None  # noqa: S101
        if seen.job is None and evidence.deleted is None:
            evidence.deleted, self._changed = evidence.updated, True
        if state is None:
            return
        change = StateChange(evidence.updated, str(state.phase), state.reason, state.message)
        if not evidence.states or replace(evidence.states[-1], time=change.time) != change:
            evidence.states = [*evidence.states, change][-MAX_STATES:]
            self._changed = True
        self._take_cause(evidence, state)

    def _take_cause(self, evidence: KeptJob, state: State) -> None:
        """Take over the cause of a state, unless it can only say less than the one that is kept."""
        before = evidence.cause
        if state.phase in (Phase.TERMINATING, Phase.DELETED):
            return  # the cause is what was wrong before
        if before and before.phase == state.phase == Phase.FAILED and _lacks_pods(state):
            return
        found = state.cause
        evidence.cause = KeptCause(evidence.updated, str(state.phase), found) if found else None
        if _summary(before) != _summary(evidence.cause):
            self._changed = True

    def _is_new(self, item: Object) -> bool:
        """Return whether this version of an object was not seen before."""
        meta = item.get("metadata") or {}
        key, version = str(meta.get("uid") or meta.get("name")), str(meta.get("resourceVersion") or id(item))
        if self._versions.get(key) == version:
            return False
        self._versions[key] = version
        return True

    def _write(self) -> None:
        evidence = self._evidence
        assert evidence is not None  # noqa: S101
        if self._broken:
            return
        began = time.monotonic()
        evidence.pods = list(self._pods.values())
        evidence.lines = {pod: list(lines) for pod, lines in self._lines.items()}
        try:
            self._store.write(evidence)
        except OSError as error:
            self._complain(error)
            return
        self._changed = False
        ended = time.monotonic()
        self._next_write = ended + max(WRITE_EVERY, WRITE_SHARE * (ended - began))

    def _complain(self, error: OSError) -> None:
        self._broken = True
        self._note(f"nothing can be kept of this job for later: {error.strerror or error}: {self._store.folder}")


def _lacks_pods(state: State) -> bool:
    return any(pod.phase == PodPhase.MISSING for pod in state.pods)


def _summary(cause: KeptCause | None) -> tuple[str, ...]:
    """Return what of a cause does not count up."""
    return (cause.phase, cause.finding.code, cause.finding.sentence) if cause else ()
