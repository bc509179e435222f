"""PodLog: reads the log of one pod, over broken connections and restarts of its container."""

from __future__ import annotations

import enum
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Final

from flk.errors import ApiError
from flk.jobs.logs.lines import LineFilter, LogLine, LogPosition, stamp_of
from flk.kube import Object
from flk.kube.client import UnendedLine
from flk.kube.watch import STARTING, WHILE_STARTING
from flk.observe.client import JobClient
from flk.observe.pods import phase_of
from flk.observe.progress import split_stamp
from flk.observe.resources import PODS

IDLE: Final = 240.0  # seconds without a line after which a log is requested again: its connection may be dead
_BACKOFFS: Final = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between requests that bring no new line


class _Container(enum.Enum):
    RUNNING = "running, or about to be restarted"
    ENDED = "ended, and its log is complete"
    GONE = "gone: the name has no pod, or another one"


class _Refusals:
    """Tells refusals to show a log from those of an API server that has just started, which end soon."""

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed  # whether the user could once read this log, or the one before
        self._since = 0.0  # when the API server began to refuse as one that has just started does; 0: it does not

    def note_answer(self) -> None:
        """Note that the API server shows the log."""
        self._allowed, self._since = True, 0.0

    def persists(self, error: ApiError) -> bool:
        """Return whether ``error`` is a refusal that does not end soon."""
        if error.status not in WHILE_STARTING:
            self._since = 0.0
            return False
        self._since = self._since or monotonic()
        return (error.status == 403 and not self._allowed) or monotonic() - self._since > STARTING


class PodLog:
    """Reads the log of one pod, request by request. The chosen lines go to ``put``, and all texts to ``keep``.

    ``fresh`` is False for a pod that replaces another: its log is read from the start, whatever the options say.
    """

    def __init__(
        self,
        client: JobClient,
        pod: Object,
        chosen: LineFilter,
        put: Callable[[Iterable[LogLine]], None],
        closed: threading.Event,
        *,
        fresh: bool,
        keep: Callable[[str, str, str], None] = lambda pod, time, line: None,
    ) -> None:
        self.error: Exception | None = None  # the error that has ended the reading early
        self.name = str(pod["metadata"]["name"])
        self._client, self._pod, self._put, self._closed, self._keep = client, pod, put, closed, keep
        self._lines, self._options = chosen.lines(self.name), chosen.options
        self._ends = fresh and bool(chosen.options.tail)  # whether the next request is for the last lines only
        self._query = chosen.options.query() if fresh else {}
        self._cut = fresh and chosen.options.cuts  # whether the first request leaves out the beginning
        self._position = LogPosition(cut=self._cut)
        self._completed = threading.Event()
        self._asked = 0.0  # when the log was requested first, by the API server's clock
        self._rest = b""  # a last line without an end, which the next request reads again
        self._refusals = _Refusals(allowed=not fresh)

    @property
    def complete(self) -> bool:
        """Whether no line can come any more."""
        return self._completed.is_set()

    def await_end(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until the log is complete."""
        self._completed.wait(timeout)

    def read(self, *, follow: bool) -> bool:
        """Send one request, pass on what is new, and return whether there was anything. Raises nothing.

        With ``follow`` the request ends when the container does.
        """
        try:
            return self._read(follow)
        except Exception as error:  # of any kind: the thread that prints raises it
            self.error = error
            self._completed.set()
            return False

    def _read(self, follow: bool) -> bool:
        new_lines, container = False, _Container.RUNNING
        try:
            container = self._container()
            if container == _Container.GONE:
                return self._end()  # a request by the name would read the log of the pod that has it now
            self._asked = self._asked or self._client.now()
            # After the container's end, one more request reads what a broken stream may have missed.
            # The last lines are not followed: only at their end is it known which of them are no records.
            follow = follow and container == _Container.RUNNING and not self._ends
            query = {"container": self._options.container, "follow": follow, "timestamps": True, **self._query}
            with self._client.stream_log(self._pod, IDLE, **query) as found:
                self._refusals.note_answer()
                lines = self._whole(found, container)
                if self._ends:
                    new_lines = self._take_last([*lines])
                for line in lines:
                    new_lines = self._take(line) or new_lines
                    if self._closed.is_set():
                        return new_lines
            if container == _Container.ENDED:
                self._completed.set()
        except ApiError as error:
            if container == _Container.ENDED and error.status in (400, 404):
                return self._end() or new_lines
            if self._refusals.persists(error):
                if error.status != 404:
                    raise
                return self._end() or new_lines
        if since := self._position.resume() or self._begin():
            self._query = {"sinceTime": since}
        return new_lines

    def _end(self) -> bool:
        """Pass on what was kept back, as no more of this log comes, and return whether there was something new."""
        new = bool(self._rest) and self._take(self._rest)
        self._completed.set()
        return new

    def _whole(self, lines: Iterator[bytes], container: _Container) -> Iterator[bytes]:
        """Yield the lines of an answer. A last one without an end is kept back until the container has ended."""
        for line in lines:
            if isinstance(line, UnendedLine) and container != _Container.ENDED:
                self._rest = line
            else:
                self._rest = b""
                yield line

    def _begin(self) -> str:
        """Return the time to request the log from while no line has come, empty for the options' own choice."""
        if self._ends or not self._cut or not self._asked:
            return ""
        begin = self._options.begin(self._asked)
        return "" if begin is None else stamp_of(begin)

    def _take(self, line: bytes) -> bool:
        """Pass on a line if it is new, and return whether it is."""
        if not self._position.accept(line):
            return False
        time, text = split_stamp(line)
        self._keep(self.name, time, text)
        self._put(self._lines.chosen([(time, text)]))
        return True

    def _take_last(self, lines: list[bytes]) -> bool:
        """Pass on the last lines that ``--tail`` means, and return whether there was any line."""
        self._ends, self._query = False, {**self._query, "tailLines": None}
        read = [split_stamp(line) for line in lines if self._position.accept(line)]
        for time, text in read:
            self._keep(self.name, time, text)
        self._put(self._lines.chosen(self._options.last(read)))
        return bool(read)

    def _container(self) -> _Container:
        """Return how the container is, as far as is known. Raises ApiError if the API server refuses to tell."""
        try:
            pod = self._client.find(PODS, self.name)
        except ApiError as error:
            if error.status in WHILE_STARTING:
                raise
            return _Container.RUNNING
        if pod is None or pod["metadata"]["uid"] != self._pod["metadata"]["uid"]:
            return _Container.GONE
        return _Container.ENDED if phase_of(pod) in ("Succeeded", "Failed") else _Container.RUNNING


class PodReader(threading.Thread):
    """A thread that follows the log of one pod until it is complete or ``closed`` is set."""

    def __init__(self, log: PodLog, closed: threading.Event) -> None:
        super().__init__(daemon=True, name=f"flk-log-{log.name}")
        self.log = log
        self._closed = closed
        self.start()

    def run(self) -> None:
        idle = 0  # requests in a row that brought no new line
        while not self._closed.is_set():
            idle = 0 if self.log.read(follow=True) else idle + 1
            if self.log.complete:
                return
            self._closed.wait(_BACKOFFS[min(idle, len(_BACKOFFS) - 1)])


ROUND: Final = 20.0  # seconds between two requests for a log that is not followed
AT_ONCE: Final = 8  # such logs that are read at once
_LAST_ROUND: Final = 1.0  # seconds between two requests for such a log when the job has ended


class PodPollers:
    """A few threads that ask for new lines of many pods in turn, and hold no connection in between.

    Once ``ended`` is set they ask often: the job has ended, and only the last lines are missing.
    """

    def __init__(self, closed: threading.Event, ended: threading.Event) -> None:
        self._closed, self._ended = closed, ended
        self._asked: queue.Queue[tuple[PodLog, float]] = queue.Queue()  # each with the time of its last request
        self._threads = 0

    def add(self, log: PodLog) -> None:
        """Begin to read a log."""
        self._asked.put((log, -math.inf))
        if self._threads < AT_ONCE:
            self._threads += 1
            threading.Thread(target=self._run, daemon=True, name=f"flk-poll-{self._threads}").start()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                log, asked = self._asked.get(timeout=_LAST_ROUND)
            except queue.Empty:
                continue
            self._await_turn(asked)
            log.read(follow=False)
            if not log.complete:
                self._asked.put((log, monotonic()))

    def _await_turn(self, asked: float) -> None:
        """Wait until a log is due that was requested at that time."""
        while not self._closed.is_set():
            ended = self._ended.is_set()
            left = asked + (_LAST_ROUND if ended else ROUND) - monotonic()
            if left <= 0:
                return
            (self._closed if ended else self._ended).wait(left)
