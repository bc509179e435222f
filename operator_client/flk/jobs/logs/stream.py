"""Follow the logs of all pods of a job: one merged stream that ends with the job.

One thread watches the job and starts a reader for each pod, the readers put lines into a queue, and the caller's thread
takes them out, so that a slow terminal holds up no watch. A few threads read the logs of pods beyond a limit in turn.
The end is the hard part: a job has ended before its last lines have come, since each kubelet hands them on in its own
time. So the stream goes on as long as more logs become complete, and then says which ones may be cut.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Final

from flk.jobs.answer import LINE_LIMIT, LINES_OF_A_POD, answer_of, is_kept, keep, lines_of_a_pod
from flk.jobs.logs.lines import Folder, LineFilter, LogLine, LogOptions, in_short
from flk.jobs.logs.reader import ROUND, PodLog, PodPollers, PodReader
from flk.jobs.state import Phase, State, derive
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.follower import follow_job
from flk.observe.model import PodPhase
from flk.observe.observation import Observation
from flk.observe.pods import CLOCK_SKEW, has_log
from flk.observe.reader import Reader
from flk.observe.redaction import secrets_of
from flk.observe.view import JobView
from flk.spec.units import short_duration, timestamp
from flk_runtime.contract import log_format
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.record import JobRecord
from flk_runtime.contract.secrets import hidden

FOLLOWED: Final = 200  # pods whose logs are followed at once, each over a connection; the logs of other pods are polled
QUEUED: Final = 5000  # lines that may wait to be printed
_INTERVAL: Final = 0.3  # seconds between two observations of a job in which nothing changes
_AFTER_END: Final = 30.0  # seconds after the job's end in which pods may run on, and in which a last line must come
_WAITING: Final = (Phase.PENDING, Phase.QUEUED, Phase.SUSPENDED)


def follow(client: JobClient, name: str, options: LogOptions) -> Generator[LogLine, None, None]:
    """Yield all lines of a job, from the first one, until it has ended and its last line has come, or it is stuck.

    The last answer about the job is kept. Raises JobNotFoundError if there is no such job.
    """
    lines = _merged(client, name, options)
    folder = Folder() if options.fold else None
    for line in lines:
        if folder is None:
            if line is not None:
                yield line
        elif line is None:
            yield from folder.due()
        else:
            yield from folder.add(line)
    if folder is not None:
        yield from folder.rest()


def _merged(client: JobClient, name: str, options: LogOptions) -> Iterator[LogLine | None]:
    """Yield the lines of all pods as they come, and None after a moment without one."""
    with contextlib.closing(_Merger(client, name, options)) as merger:
        while True:
            try:
                line = merger.lines.get(timeout=0.2)
            except queue.Empty:
                yield None
                continue
            if line is None:
                break
            yield line
        if merger.error is not None:
            raise merger.error


class _Merger:
    """A thread that follows a job and starts a reader for the log of every pod."""

    def __init__(self, client: JobClient, name: str, options: LogOptions) -> None:
        self.lines: queue.Queue[LogLine | None] = queue.Queue(QUEUED)  # None is the end
        self.error: Exception | None = None
        self._client, self._name, self._options = client, name, options
        self._closed = threading.Event()
        self._logs: dict[str, PodLog] = {}  # by the pods' UIDs
        self._readers: list[PodReader] = []
        self._job_ended = threading.Event()
        self._pollers = PodPollers(self._closed, self._job_ended)
        self._names: set[str] = set()  # of pods whose log is or was read
        self._noted: set[str] = set()  # notes that are given once
        self._record: JobRecord | None = None  # the last one in the logs
        self._view: JobView | None = None  # the last one before the job was deleted
        self._kept = LINES_OF_A_POD[1]  # lines of each pod
        self._secrets: list[str] = []  # of the job
        self._tails: dict[str, deque[tuple[str, str]]] = {}  # time and text of the last lines, by pod
        self._ended = math.inf  # when the job was seen to have ended, by the API server's clock
        self._last_line = 0.0  # when the last line came that is not younger than that
        threading.Thread(target=self._run, daemon=True, name="flk-logs").start()

    def close(self) -> None:
        """Have all threads end, and keep the last answer."""
        self._closed.set()
        self._job_ended.set()
        if self._view is None:
            return
        seen = self._view.seen
        view = JobView(replace(seen, record=self._record or seen.record), self._client.commands)
        lines = {pod: list(tail) for pod, tail in self._tails.copy().items()}
        keep(self._client, answer_of(view), lines)

    def _run(self) -> None:
        try:
            ended = self._follow()
            self.error = self._failed()
            if ended and self.error is None:
                self._await_last_lines()
                self.error = self._failed()
        except Exception as error:  # of any kind: the thread that prints raises it
            self.error = error
        finally:
            self._put([None])

    def _failed(self) -> Exception | None:
        """Return the error of the first log that cannot be read."""
        return next((log.error for log in self._logs.values() if log.error), None)

    def _follow(self) -> bool:
        """Read the logs of all pods. Return whether the job has ended, so that last lines come."""
        reader = Reader(self._client)
        chosen: LineFilter | None = None
        with closing(follow_job(self._client, self._name, _INTERVAL)) as observations:
            for seen in observations:
                if self._closed.is_set() or self._failed():
                    break
                if seen.gone is not None or seen.job is None:
                    self._note("deleted", f"job {self._name} was deleted")
                    return True
                # Anew each time: an elastic job may have more pods now.
                chosen = LineFilter.of(JobView(Observation(seen.job)), self._options, chosen)
                self._kept, self._secrets = lines_of_a_pod(len(chosen.names)), secrets_of(seen.job)
                for pod in sorted(seen.pods, key=chosen.order):
                    self._start(pod, chosen)
                self._view = view = reader.view(seen)
                state = derive(view)
                if state.phase == Phase.STUCK:  # its pods may print for ever
                    return False
                if self._is_complete(state):
                    return True
                if (state.phase in _WAITING or view.sent_away) and state.message:  # no pod may ever be here
                    self._note(f"waiting: {state.reason}", f"job {self._name} is {state.headline}")
        return False

    def _is_complete(self, state: State) -> bool:
        """Return whether no line can come any more, but from logs that are being read."""
        if not state.finished:
            return False
        running = any(pod.phase == PodPhase.RUNNING for pod in state.pods)
        if not running or all(log.complete for log in self._logs.values()):
            return True
        # Pods of a program without flk's launcher may run on after the job has failed.
        over = state.ended is not None and self._client.now() - state.ended > _AFTER_END
        return over and state.phase == Phase.FAILED

    def _start(self, pod: Object, chosen: LineFilter) -> None:
        """Begin to read the log of a pod, unless it is being read or there is none yet."""
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if uid in self._logs or not chosen.wants(pod) or not has_log(pod, self._options.container):
            return
        base = chosen.base_name(name)
        recreated = base in self._names
        if recreated:
            node = (pod.get("spec") or {}).get("nodeName")
            self._note(uid, f"{base} was recreated{f' on {node}' if node else ''}")
        self._names.add(base)
        log = PodLog(self._client, pod, chosen, self._put, self._closed, fresh=not recreated, keep=self._keep)
        self._logs[uid] = log
        self._readers = [reader for reader in self._readers if not reader.log.complete]
        if len(self._readers) < FOLLOWED:
            self._readers.append(PodReader(log, self._closed))
        else:
            self._note(
                "polled",
                f"following the logs of {plural(FOLLOWED, 'pod')}; lines of other pods come every {ROUND:g} s. --rank "
                "and --pod choose pods",
            )
            self._pollers.add(log)

    def _await_last_lines(self) -> None:
        """Wait until all logs are complete, as long as more of them comes. Lines of pods that run on do not count."""
        self._ended = self._client.now()
        self._job_ended.set()
        left = math.inf
        while (missing := [log for log in self._logs.values() if not log.complete]) and not self._closed.is_set():
            if len(missing) < left or self.lines.full():  # full: who prints the lines is slow
                left, self._last_line = len(missing), time.monotonic()
            elif time.monotonic() - self._last_line > _AFTER_END:
                which, whose = in_short([log.name for log in missing]), "its log" if len(missing) == 1 else "their logs"
                more, silent = self._client.commands.flk("logs", self._name), short_duration(_AFTER_END)
                self._note(
                    "missing",
                    f"{which} may print more, or {whose} cannot be read: in {silent} no line came from before the "
                    f"job's end. {more} --no-follow shows what there is",
                )
                break
            missing[0].await_end(0.2)

    def _keep(self, pod: str, stamp: str, line: str) -> None:
        """Keep a line as evidence. Called by the threads that read logs."""
        if self._ended < math.inf and 0 < timestamp(stamp) <= self._ended + CLOCK_SKEW:  # 0: of the kubelet
            self._last_line = time.monotonic()
        if not self._options.of_ranks:
            return
        if record := log_format.parse_record(line):
            self._record = record
        elif is_kept(line):
            if len(line) > LINE_LIMIT:  # the secrets of shorter ones are hidden when they are kept
                line = hidden(line, self._secrets)[:LINE_LIMIT]
            self._tails.setdefault(pod, deque(maxlen=self._kept)).append((stamp, line))

    def _note(self, key: str, text: str) -> None:
        """Pass a note on, unless a note with this key was passed on before."""
        if key not in self._noted:
            self._noted.add(key)
            self._put([LogLine(text, note=True)])

    def _put(self, lines: Iterable[LogLine | None]) -> None:
        for line in lines:
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    self.lines.put(line, timeout=0.5)
                    break
