"""Merge the logs of all pods of a job: `follow` as lines come, `dump` those that are there now."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from flk.diagnose import Picture
from flk.diagnose.pods import has_log
from flk.errors import ApiError, ForbiddenError, WaitTimeoutError
from flk.jobs.client import JobClient
from flk.jobs.follower import Follower, is_owned_by
from flk.jobs.logs.lines import LineFilter, LogLine, LogOptions
from flk.jobs.logs.reader import IDLE, PodReader
from flk.jobs.state import Phase, PodPhase, State, derive
from flk.kube import Object

FOLLOWED: Final = 200  # pods whose logs are followed at once
DUMPED: Final = 8  # pods whose logs are read at once, and held until it is their turn
QUEUED: Final = 5000  # lines that may wait to be printed
_INTERVAL: Final = 0.3  # seconds between two looks at a job in which nothing changes
_AFTER_END: Final = 30.0  # seconds after the job's end in which the last lines must come


def dump(client: JobClient, name: str, options: LogOptions) -> Iterator[LogLine]:
    """Yield the lines that are there now, pod by pod.

    A pod whose log cannot be read gets a note. Raises the error of a pod if no log could be read at all.
    """
    job = client.get_job(name)
    chosen = LineFilter(job, options)
    pods = [pod for pod in client.list_pods(name) if is_owned_by(pod, job["metadata"]["uid"]) and chosen.wants(pod)]
    remaining = iter(sorted(pods, key=chosen.index))
    failure, readable = None, False
    with ThreadPoolExecutor(DUMPED) as pool:
        reading: deque[tuple[Object, Future[list[bytes]]]] = deque()
        for pod in itertools.islice(remaining, DUMPED):
            reading.append((pod, pool.submit(_read_all, client, pod, options)))
        while reading:
            pod, future = reading.popleft()
            for following in itertools.islice(remaining, 1):
                reading.append((following, pool.submit(_read_all, client, following, options)))
            try:
                lines = future.result()
            except ForbiddenError:
                raise
            except ApiError as error:
                if error.status == 400:  # its container has not started, or was never restarted
                    readable = True
                    of_container = " of an earlier container" if options.previous else ""
                    yield LogLine(f"{pod['metadata']['name']} has no log{of_container}", note=True)
                else:
                    failure = error
                    yield LogLine(f"the log of {pod['metadata']['name']} cannot be read: {error}", note=True)
                continue
            readable = True
            yield from chosen.shown(pod, lines)
    if failure is not None and not readable:
        raise failure


def follow(client: JobClient, name: str, options: LogOptions, *, timeout: float | None = None) -> Iterator[LogLine]:
    """Yield all lines of a job, those that are there first, until it has ended and its last line has come.

    Raises JobNotFoundError if there is no such job, and WaitTimeoutError after ``timeout`` seconds.
    """
    until = None if timeout is None else time.monotonic() + timeout
    merger = _Merger(client, name, options)
    try:
        while True:
            if until is not None and time.monotonic() >= until:
                raise WaitTimeoutError(
                    f"job {name} has not ended within {timeout:g} s",
                    hint=f"the job goes on; {client.command('logs', name)} shows the rest",
                )
            try:
                yield merger.lines.get(timeout=0.2)
            except queue.Empty:
                if not merger.running and merger.lines.empty():
                    break
        if merger.error is not None:
            raise merger.error
    finally:
        merger.close()


class _Merger:
    """A thread that follows a job and starts a reader for every pod that it gets."""

    def __init__(self, client: JobClient, name: str, options: LogOptions) -> None:
        self.lines: queue.Queue[LogLine] = queue.Queue(QUEUED)
        self.error: Exception | None = None
        self._client, self._name, self._options = client, name, options
        self._closed = threading.Event()
        self._readers: dict[str, PodReader] = {}  # by the pods' UIDs
        self._names: set[str] = set()  # of pods that have or had a reader
        self._noted: set[str] = set()  # notes that are given once
        self._thread = threading.Thread(target=self._run, daemon=True, name="flk-logs")
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether lines may still come."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Have all threads end."""
        self._closed.set()

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # of any kind: the thread that prints raises it
            self.error = error
        finally:
            self._await_readers()

    def _follow(self) -> None:
        with Follower(self._client, self._name) as follower:
            for seen in follower.updates(interval=_INTERVAL):
                if self._closed.is_set() or any(reader.error for reader in self._readers.values()):
                    return
                if seen.job is None:
                    self._note("deleted", f"job {self._name} was deleted")
                    return
                chosen = LineFilter(seen.job, self._options)
                for pod in sorted(seen.pods, key=chosen.index):
                    self._start_reader(pod, chosen)
                state = derive(Picture(seen.job, seen.pods, now=self._client.now()))
                if self._is_complete(state):
                    return
                if state.phase in (Phase.PENDING, Phase.STUCK, Phase.QUEUED, Phase.SUSPENDED) and state.message:
                    self._note("waiting", f"job {self._name} is {state.headline}")

    def _is_complete(self, state: State) -> bool:
        """Return whether no line can come any more, but from readers that are at work."""
        if not state.finished:
            return False
        if not any(reader.running for reader in self._readers.values()):
            return True
        if state.phase != Phase.FAILED:
            return False
        # Pods of a program without flk's launcher may run on after the job has failed.
        running = any(pod.phase == PodPhase.RUNNING for pod in state.pods)
        return not running or (state.ended is not None and self._client.now() - state.ended > _AFTER_END)

    def _start_reader(self, pod: Object, chosen: LineFilter) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if uid in self._readers or not chosen.wants(pod) or not has_log(pod):
            return
        if sum(reader.running for reader in self._readers.values()) >= FOLLOWED:
            self._note("limit", f"following the logs of {FOLLOWED} pods; choose others with --rank")
            return
        recreated = name in self._names
        if recreated:
            node = (pod.get("spec") or {}).get("nodeName")
            self._note(uid, f"{name} was recreated{f' on {node}' if node else ''}")
        self._names.add(name)
        self._readers[uid] = PodReader(self._client, pod, chosen, self._put, self._closed, fresh=not recreated)

    def _await_readers(self) -> None:
        until = time.monotonic() + _AFTER_END
        for reader in self._readers.values():
            while reader.running and not self._closed.is_set() and time.monotonic() < until:
                reader.join(0.2)
            self.error = self.error or reader.error

    def _note(self, key: str, text: str) -> None:
        """Pass a note on, unless one with this key was."""
        if key not in self._noted:
            self._noted.add(key)
            self._put([LogLine(text, note=True)])

    def _put(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            while not self._closed.is_set():
                try:
                    self.lines.put(line, timeout=0.5)
                    break
                except queue.Full:
                    continue


def _read_all(client: JobClient, pod: Object, options: LogOptions) -> list[bytes]:
    with client.stream_log(pod["metadata"]["name"], IDLE, **options.query()) as lines:
        return list(lines)
