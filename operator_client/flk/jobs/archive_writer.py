"""ArchiveWriter: archives the observations of one job in the user's state folder while flk follows the job."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flk import labels
from flk.jobs.state import Phase, State
from flk.kube import Object
from flk.observe.archive import LocalArchive
from flk.observe.archive.redaction import kept_event, kept_job, kept_pod, masked, secrets_of
from flk.observe.client import JobClient
from flk.observe.model import PodPhase
from flk.observe.observation import FoundCause, Observation, StateChange
from flk.targets import target_of
from flk_runtime.contract.log_format import parse_record
from flk_runtime.contract.secrets import hidden

if TYPE_CHECKING:
    from flk.jobs.listing import Listed

WRITE_EVERY: Final = 5.0  # seconds between two writes of changes
WRITE_SHARE: Final = 20  # and at least so many times the duration of the last write, for jobs of many pods
MAX_STATES, MAX_EVENTS, MAX_REPLACED = 500, 500, 500  # the newest are kept
MAX_LINES: Final = 20_000  # lines of all pods together
LINES_OF_A_POD: Final = (5, 200)  # fewest and most lines of one pod
LINE_LIMIT: Final = 1000  # characters of a line
BUDGET: Final = 0.5  # seconds in which the jobs of a list are archived


def remember(client: JobClient, seen: Observation, state: State | None = None, *, prune: bool = True) -> None:
    """Archive one observation of a job, so that it is known when somebody has deleted the job.

    With ``prune``, delete what is old.
    """
    writer = ArchiveWriter(client)
    writer.observe(seen, state)
    (writer.close if prune else writer.flush)()


def remember_all(client: JobClient, listed: Iterable[Listed]) -> None:
    """Archive what a list has seen of jobs that flk has made, the unfinished ones first, within half a second."""
    until, last = time.monotonic() + BUDGET, None
    read = [each for each in listed if each.state.phase != Phase.UNKNOWN]
    own = [each for each in read if each.seen.job and labels.JOB in labels.of(each.seen.job)]
    for each in sorted(own, key=lambda each: (each.state.finished, -each.state.created)):
        last = ArchiveWriter(JobClient(client.api, each.state.namespace), partial=True)
        last.observe(each.seen, each.state)
        last.flush()
        if time.monotonic() > until:
            break
    if last is not None:
        last.close()


class ArchiveWriter:
    """Archives the observations and the last log lines of one job. Several threads may use one writer.

    The secrets that the job's object has in plain text are hidden. A state folder that cannot be written does not
    disturb the command: ``note`` is called once with the reason.
    """

    def __init__(
        self, client: JobClient, note: Callable[[str], None] = lambda text: None, *, partial: bool = False
    ) -> None:
        """``partial``: logs, nodes and the like are not read, so that a cause that is not found may be there still."""
        self._client, self._archive, self._note, self._partial = client, LocalArchive(client), note, partial
        self._lock = threading.Lock()
        self._archived: Observation | None = None
        self._secrets: list[str] = []
        self._pods: dict[str, Object] = {}
        self._versions: dict[str, str] = {}  # of the objects that are kept, by UID
        self._lines: dict[str, deque[tuple[str, str]]] = {}  # time and text, by pod
        self._lines_of_a_pod = LINES_OF_A_POD[1]
        self._changed = False
        self._broken = False
        self._next_write = 0.0
        self._written = 0.0

    def observe(self, seen: Observation, state: State | None = None) -> None:
        """Record an observation, and write the archive periodically. A job that is gone stays as it was seen last."""
        with self._lock:
            if seen.job is not None and seen.gone is None:
                self._take_job(seen.job)
            if self._archived is None:
                return  # it was gone before it was ever seen
            for pod in seen.pods:
                self._take_pod(pod)
            self._take(
                time=self._client.now(),
                replaced_pods=self._replaced_pods(seen),
                events=self._events(seen.events),
                record=masked(seen.record, self._secrets) or self._archived.record,
                progress=seen.progress or self._archived.progress,
                seen_by=self._client.commands.connection.caller,
                diff=seen.diff or self._archived.diff,
            )
            if seen.gone is not None and self._archived.gone is None:
                self._take(gone=self._archived.time)
            if state is not None:
                self._take_state(state)
            if self._changed and time.monotonic() >= self._next_write:
                self._write()

    def add_line(self, pod: str, line: str, time: str = "") -> None:
        """Add a line of a pod's log, and when the kubelet has received it."""
        with self._lock:
            lines = self._lines.setdefault(pod, deque())
            lines.append((time, self._kept_line(line)))
            while len(lines) > self._lines_of_a_pod:
                lines.popleft()
            self._changed = True

    def set_lines(self, pod: str, lines: Sequence[tuple[str, str]]) -> None:
        """Replace the kept lines of a pod's log by these, pairs of a time and a text, without the records in them."""
        kept = [(time, text) for time, text in lines if parse_record(text) is None][-self._lines_of_a_pod :]
        with self._lock:
            self._lines[pod] = deque((time, self._kept_line(text)) for time, text in kept)
            self._changed = True

    def flush(self) -> None:
        """Write what is known, even if nothing else has changed: when the job was seen last."""
        with self._lock:
            if self._archived is not None and (self._changed or time.monotonic() - self._written > 1.0):
                self._write()

    def close(self) -> None:
        """Write what is known, and delete what is old."""
        self.flush()
        with self._lock:
            if self._archived is not None and not self._broken:
                try:
                    self._archive.prune()
                except OSError as error:
                    self._complain(error)

    def _kept_pod(self, pod: Object) -> Object:
        kept = kept_pod(pod)
        return {**kept, "status": masked(kept["status"], self._secrets)}

    def _kept_line(self, line: str) -> str:
        return hidden(line, self._secrets)[:LINE_LIMIT]

    def _take(self, **changes: Any) -> None:
        """Change the observation to archive. It is written soon if more has changed than its time and the progress."""
        before = self._observed
        self._archived = replace(before, **changes)
        self._changed = self._changed or replace(self._archived, time=before.time, progress=before.progress) != before

    @property
    def _observed(self) -> Observation:
        assert self._archived is not None  # noqa: S101
        return self._archived

    def _take_job(self, job: Object) -> None:
        meta = job["metadata"]
        if self._archived is None:
            self._archived = self._archive.find(meta["name"], meta["uid"]) or Observation(job)
            self._pods = {pod["metadata"]["name"]: pod for pod in self._archived.pods}
            for pod in self._archived.logs:
                # Lines that were read meanwhile are newer, and may be the same.
                self._lines.setdefault(pod, deque(self._archived.lines_of(pod)))
            pods = sum(replicas.count for replicas in target_of(job).replicas(job).values())
            fewest, most = LINES_OF_A_POD
            self._lines_of_a_pod = max(fewest, min(most, MAX_LINES // max(1, pods)))
        if self._is_new(job):
            self._secrets = secrets_of(job)
            self._archived, self._changed = replace(self._archived, job=kept_job(job), gone=None), True

    def _take_pod(self, pod: Object) -> None:
        if self._is_new(pod):
            self._pods[pod["metadata"]["name"]] = self._kept_pod(pod)
            self._changed = True

    def _replaced_pods(self, seen: Observation) -> Mapping[str, Object]:
        before = self._observed.replaced_pods
        new = {
            name: self._kept_pod(pod)
            for name, pod in seen.replaced_pods.items()
            if self._is_new(pod) or name not in before
        }
        return dict([*{**before, **new}.items()][-MAX_REPLACED:]) if new else before

    def _events(self, events: Sequence[Object]) -> Sequence[Object]:
        new = [event for event in events if self._is_new(event)]
        names = {event["metadata"]["name"] for event in new}
        kept = [event for event in self._observed.events if event["metadata"]["name"] not in names]
        return [*kept, *masked([kept_event(event) for event in new], self._secrets)][-MAX_EVENTS:]

    def _take_state(self, state: State) -> None:
        seen = self._observed
        if self._partial and not state.reason and seen.states and seen.states[-1].phase == str(state.phase):
            return
        change = StateChange(seen.time, str(state.phase), state.reason, hidden(state.message, self._secrets))
        if not seen.states or replace(seen.states[-1], time=change.time) != change:
            self._take(states=[*seen.states, change][-MAX_STATES:])
        self._take_cause(state)

    def _take_cause(self, state: State) -> None:
        """Archive the cause of a state, unless the archived cause says more."""
        before = self._observed.cause
        if state.phase in (Phase.TERMINATING, Phase.DELETED):
            return  # the cause is what was wrong before
        if before and before.phase == state.phase == Phase.FAILED and _lacks_pods(state):
            return
        cause = masked(state.cause, self._secrets)
        found = FoundCause(self._observed.time, str(state.phase), cause) if cause else None
        self._archived = replace(self._observed, cause=found)
        self._changed = self._changed or _summary(before) != _summary(found)

    def _is_new(self, item: Object) -> bool:
        """Return whether this version of an object was not seen before."""
        meta = item.get("metadata") or {}
        key, version = str(meta.get("uid") or meta.get("name")), str(meta.get("resourceVersion") or id(item))
        if self._versions.get(key) == version:
            return False
        self._versions[key] = version
        return True

    def _write(self) -> None:
        if self._broken:
            return
        began = time.monotonic()
        logs = {pod: [text for _, text in lines] for pod, lines in self._lines.items()}
        times = {
            pod: [time for time, _ in lines] for pod, lines in self._lines.items() if any(time for time, _ in lines)
        }
        try:
            self._archive.write(replace(self._observed, pods=[*self._pods.values()], logs=logs, log_times=times))
        except OSError as error:
            self._complain(error)
            return
        self._changed = False
        ended = self._written = time.monotonic()
        self._next_write = ended + max(WRITE_EVERY, WRITE_SHARE * (ended - began))

    def _complain(self, error: OSError) -> None:
        self._broken = True
        self._note(f"nothing can be kept of this job for later: {error.strerror or error}: {self._archive.folder}")


def _lacks_pods(state: State) -> bool:
    return any(pod.phase == PodPhase.MISSING for pod in state.pods)


def _summary(cause: FoundCause | None) -> tuple[str, ...]:
    """Return phase, code and sentence of a cause: the part that no counter changes."""
    return (cause.phase, cause.finding.code, cause.finding.sentence) if cause else ()
