"""Every rank's lines, from all pods of a job, as they come or as they are.

One thread reads each pod. Lines carry the kubelet's time stamps on the way, so that a broken stream goes on exactly
where it ended: it is asked for again from a second earlier, and lines that have been seen are dropped.
"""

from __future__ import annotations

import itertools
import queue
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from flk.errors import ApiError, FlkError, JobNotFoundError, UsageError
from flk.jobs import state as states
from flk.jobs.client import JobClient
from flk.jobs.follower import Follower, owned_by
from flk.jobs.state import Phase
from flk.kube.resources import Object
from flk_runtime import contract

FOLLOWED: Final = 200  # pods whose logs are followed at once
DUMPED: Final = 8  # pods whose logs are read at once, and held until it is their turn
IDLE: Final = 240.0  # seconds without a line until a stream is asked for again: what lies between may have dropped it
READY: Final = 5000  # lines that wait to be printed
_PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
_AFTER_END: Final = 30.0  # seconds after the job's end in which the last lines must come

_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ")
_RANK: Final = re.compile(r"\[rank (\d+)\] ")
_TAGGED: Final = re.compile(r"\[(?:rank|pod) \d+\] ")
_COLOUR: Final = r"\x1b\[[0-9;]*m"
# Sequences that move the cursor, set titles or talk to the terminal; then all other control characters but the tab,
# and the marks that turn the direction of writing.
_SEQUENCE: Final = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x1b\\|\x07|$)|\x1b[ -/]*[0-~]"
_CONTROL: Final = r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
_ALL: Final = re.compile(f"{_SEQUENCE}|{_CONTROL}")
_NOT_COLOUR: Final = re.compile(f"({_COLOUR})|{_SEQUENCE}|{_CONTROL}")


@dataclass(frozen=True)
class Options:
    """Which lines to show."""

    ranks: frozenset[int] = frozenset()  # empty: all, and the launchers' own lines
    tail: int | None = None  # lines of each pod to begin with
    since: int | None = None  # seconds
    previous: bool = False  # of the container before the last restart
    raw: bool = False  # control characters, records and all
    colour: bool = False  # leave ANSI colours in

    def query(self) -> dict[str, Any]:
        """The API's options for the first request."""
        return {"tailLines": self.tail, "sinceSeconds": self.since, "previous": self.previous}


@dataclass(frozen=True)
class Line:
    """A line of output, or (note) something that flk has to say about it."""

    text: str
    note: bool = False


def dump(cluster: JobClient, name: str, options: Options) -> Iterator[Line]:
    """What is there now, pod by pod."""
    job = cluster.job(name)
    pods = [pod for pod in cluster.pods(name) if owned_by(pod, job["metadata"]["uid"])]
    chosen = _Choice(job, options)
    ordered = sorted((pod for pod in pods if chosen.wants(pod)), key=chosen.index)
    with ThreadPoolExecutor(DUMPED) as pool:
        waiting: deque[tuple[Object, Future[list[bytes]]]] = deque()
        rest = iter(ordered)
        for pod in itertools.islice(rest, DUMPED):
            waiting.append((pod, pool.submit(_whole, cluster, pod, options)))
        while waiting:
            pod, future = waiting.popleft()
            for following in itertools.islice(rest, 1):
                waiting.append((following, pool.submit(_whole, cluster, following, options)))
            try:
                lines = future.result()
            except ApiError as error:
                if error.status == 400:  # its container has not started, or there was none before
                    which = " of an earlier container" if options.previous else ""
                    yield Line(f"{pod['metadata']['name']} has no log{which}", note=True)
                    continue
                raise
            yield from chosen.shown(pod, lines)


def _whole(cluster: JobClient, pod: Object, options: Options) -> list[bytes]:
    with cluster.log(pod["metadata"]["name"], IDLE, **options.query()) as lines:
        return list(lines)


def follow(cluster: JobClient, name: str, options: Options) -> Iterator[Line]:
    """All lines from now on (and before) until the job has ended and its last line has come."""
    lines: queue.Queue[Line] = queue.Queue(READY)
    closed = threading.Event()
    watcher = _Watcher(cluster, name, options, lines, closed)
    thread = threading.Thread(target=watcher.run, daemon=True, name="flk-logs")
    thread.start()
    try:
        while True:
            try:
                yield lines.get(timeout=0.2)
            except queue.Empty:
                if not thread.is_alive() and lines.empty():
                    break
        if watcher.error is not None:
            raise watcher.error
    finally:
        closed.set()


class _Watcher:
    """Follows a job and starts a reader for every pod that it gets."""

    def __init__(
        self, cluster: JobClient, name: str, options: Options, lines: queue.Queue[Line], closed: threading.Event
    ) -> None:
        self.cluster, self.name, self.options, self.lines, self.closed = cluster, name, options, lines, closed
        self.error: FlkError | None = None
        self.readers: dict[str, _Reader] = {}  # by the pods' UIDs
        self.known: dict[str, str] = {}  # name of a pod → the UID that it had last
        self.waiting = False

    def run(self) -> None:
        try:
            self._run()
        except FlkError as error:
            self.error = error
        finally:
            self._finish()

    def _run(self) -> None:
        with Follower(self.cluster, self.name) as follower:
            for snapshot in follower.snapshots(beat=0.3):
                if self.closed.is_set():
                    return
                if snapshot.job is None:
                    self._note(f"job {self.name} was deleted")
                    return
                choice = _Choice(snapshot.job, self.options)
                for pod in sorted(snapshot.pods, key=choice.index):
                    self._see(pod, choice)
                state = states.derive(snapshot.job, snapshot.pods, now=self.cluster.now())
                if state.final and all(not r.thread.is_alive() for r in self.readers.values()):
                    return
                if state.final and state.phase == Phase.FAILED:
                    # A pod of another program than flk's launcher may run on after the job has failed.
                    if all(pod.phase != "Running" for pod in state.pods):
                        return
                    if _ended_for(state, self.cluster.now()) > _AFTER_END:
                        return
                self._tell_waiting(state)

    def _see(self, pod: Object, choice: _Choice) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if uid in self.readers or not choice.wants(pod) or not _has_started(pod):
            return
        if len([r for r in self.readers.values() if r.thread.is_alive()]) >= FOLLOWED:
            if len(self.readers) == FOLLOWED:
                self._note(f"following the first {FOLLOWED} pods; choose others with --rank")
            return
        before = self.known.get(name)
        if before is not None:
            node = (pod.get("spec") or {}).get("nodeName")
            self._note(f"{name} was started anew{f' on {node}' if node else ''}")
        self.known[name] = uid
        self.readers[uid] = _Reader(self, pod, choice, first=before is None)

    def _tell_waiting(self, state: states.State) -> None:
        if state.phase in (Phase.PENDING, Phase.QUEUED) and state.reason and not self.waiting:
            self.waiting = True
            self._note(f"job {self.name} is {state.headline}")

    def _finish(self) -> None:
        until = time.monotonic() + _AFTER_END
        for reader in self.readers.values():
            while reader.thread.is_alive() and not self.closed.is_set() and time.monotonic() < until:
                reader.thread.join(0.2)

    def _note(self, text: str) -> None:
        self.put([Line(text, note=True)])

    def put(self, lines: Iterable[Line]) -> None:
        for line in lines:
            while not self.closed.is_set():
                try:
                    self.lines.put(line, timeout=0.5)
                    break
                except queue.Full:
                    continue


class _Reader:
    """Reads one pod's log to its end, whatever happens to the connection."""

    def __init__(self, watcher: _Watcher, pod: Object, choice: _Choice, *, first: bool) -> None:
        self.watcher, self.pod, self.choice, self.first = watcher, pod, choice, first
        self.place = Place()
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"flk-log-{pod['metadata']['name']}")
        self.thread.start()

    def _run(self) -> None:
        watcher, name = self.watcher, self.pod["metadata"]["name"]
        query = self.watcher.options.query() if self.first else {}
        failures = 0
        while not watcher.closed.is_set():
            over = self._is_over()
            try:
                # Once the container has ended, one more request gets what a broken stream may have left behind.
                with watcher.cluster.log(name, IDLE, follow=not over, timestamps=True, **query) as lines:
                    for line in lines:
                        failures = 0
                        fresh = self.place.take(line)
                        if fresh is not None:
                            watcher.put(self.choice.shown(self.pod, [fresh]))
                        if watcher.closed.is_set():
                            return
                if over:
                    return
            except JobNotFoundError:
                return
            except ApiError as error:
                if error.status in (403, 404):
                    if error.status == 403:
                        watcher.error = watcher.error or error
                    return
                if over and error.status == 400:
                    return
                time.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
                failures += 1
            if self.place.since:
                query = {"sinceTime": self.place.since}

    def _is_over(self) -> bool:
        """Whether this pod's container runs no more: it ended, or the pod has gone or is another one now."""
        try:
            pod = self.watcher.cluster.pod(self.pod["metadata"]["name"])
        except ApiError:
            return False
        if pod is None or pod["metadata"]["uid"] != self.pod["metadata"]["uid"]:
            return True
        return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


class Place:
    """How far a log has been read."""

    def __init__(self) -> None:
        self._recent: deque[tuple[bytes, bytes]] = deque()  # second and line, of the last two seconds
        self._again: Counter[bytes] = Counter()  # lines of these seconds, which will come again
        self._second = b""
        self._zone = b"Z"

    @property
    def since(self) -> str:
        """Where to go on; what comes from there and has been seen is dropped from now on. Empty: at the beginning."""
        if not self._second:
            return ""
        self._again = Counter(line for _, line in self._recent)
        return (_before(self._second) + self._zone).decode()

    def take(self, line: bytes) -> bytes | None:
        """The line without its time stamp, or None if it has been seen."""
        match = _STAMP.match(line)
        if match is None:
            return line  # the kubelet's own words
        if self._again.get(line):
            self._again[line] -= 1
            return None
        second, self._zone = match[1], match[2]
        if second > self._second:
            self._second = second
            oldest = _before(second)
            while self._recent and self._recent[0][0] < oldest:
                self._recent.popleft()
        self._recent.append((second, line))
        return line[match.end() :]


def _before(second: bytes) -> bytes:
    return (datetime.fromisoformat(second.decode()) - timedelta(seconds=1)).isoformat().encode()


class _Choice:
    """Which pods and lines of a job are shown, and how."""

    def __init__(self, job: Object, options: Options) -> None:
        self.options = options
        plain = states.derive(job, [], now=0)
        self.processes = plain.processes
        self.indexes = {pod.name: pod.index for pod in plain.pods}
        outside = [rank for rank in sorted(options.ranks) if rank >= plain.world_size]
        if outside:
            last = plain.world_size - 1
            raise UsageError(f"--rank: job {plain.name} has ranks 0 to {last}, no rank {outside[0]}")

    def index(self, pod: Object) -> int:
        return self.indexes.get(pod["metadata"]["name"], len(self.indexes))

    def wants(self, pod: Object) -> bool:
        index = self.index(pod)
        return not self.options.ranks or any(rank // self.processes == index for rank in self.options.ranks)

    def shown(self, pod: Object, lines: Iterable[bytes]) -> Iterator[Line]:
        """Lines as people see them: tagged, without records and without what could confuse a terminal."""
        tag = contract.LAUNCHER_PREFIX.format(index=self.index(pod))
        ranks = self.options.ranks
        for raw in lines:
            text = raw.decode(errors="replace")
            if contract.is_record(text) and not self.options.raw:
                continue
            tagged = _TAGGED.match(text)
            if ranks and tagged:
                match = _RANK.match(text)
                if match is None or int(match[1]) not in ranks:
                    continue
            if not self.options.raw:
                text = clean(text, colour=self.options.colour)
            yield Line(text if tagged else tag + text)


def clean(text: str, *, colour: bool = False) -> str:
    """Text that a terminal only shows: without control characters, but for colours where they are wanted."""
    if text.isascii() and text.isprintable():
        return text
    if colour:
        kept = _NOT_COLOUR.sub(lambda match: match[1] or "", text)
        return kept + ("\x1b[0m" if "\x1b[" in kept else "")
    return _ALL.sub("", text)


def _has_started(pod: Object) -> bool:
    """Whether its container runs or has run, so that there is a log."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        if container.get("name") == contract.CONTAINER:
            state = container.get("state") or {}
            return bool(state.get("running") or state.get("terminated") or container.get("restartCount"))
    return False


def _ended_for(state: states.State, now: float) -> float:
    return now - state.ended if state.ended else 0.0
