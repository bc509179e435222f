"""LogOptions, LogLine and LineFilter: choose the pods and the lines of a job's output, and make lines fit to print."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from time import monotonic
from typing import Any, Final

from flk.errors import UsageError
from flk.kube import Object
from flk.observe.progress import STAMP
from flk.observe.reader import given_pod
from flk.observe.view import JobView
from flk.targets import Target
from flk.user.terminal import printable
from flk_runtime.contract import log_format
from flk_runtime.contract.quantities import format_ranges, plural

_RECORDS: Final = 10  # lines more that are read of the end of a log, where there may be so many records
_TAG: Final = re.compile(r"\[(rank|pod) (\d{1,9})\] ")


@dataclass(frozen=True)
class LogOptions:
    """Which lines to show, and how."""

    ranks: frozenset[int] = frozenset()  # empty: all ranks, and the lines of the launchers
    pods: frozenset[str] = frozenset()  # names or indexes of pods; empty: all
    tail: int | None = None  # number of lines of each pod to begin with
    since: int | None = None  # only lines of the last so many seconds
    container: str = ""  # of the pods; empty: the one that trains
    fold: bool = False  # show equal lines of several ranks as one
    colour: bool = False  # keep ANSI colours

    def query(self) -> dict[str, Any]:
        """Return the API's options for the first request of a log."""
        tail = self.tail + _RECORDS if self.tail else self.tail
        return {"tailLines": tail, "sinceSeconds": self.since}

    def last(self, lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the last ones of times and texts, as many as ``tail`` says, without counting records."""
        counted = [index for index, (_, text) in enumerate(lines) if not log_format.is_record(text)]
        if self.tail is None or len(counted) <= self.tail:
            return lines
        return lines[counted[-self.tail] if self.tail else len(lines) :]

    def begin(self, asked: float) -> float | None:
        """Return from when on lines count if a log that was requested at a time had none; None: from its beginning."""
        if self.tail == 0:
            return asked
        return None if self.since is None else asked - self.since

    @property
    def cuts(self) -> bool:
        """Whether the first request of a log leaves out its beginning."""
        return self.tail is not None or self.since is not None

    @property
    def of_ranks(self) -> bool:
        """Whether the lines are the ranks', which are kept as evidence."""
        return not self.container


@dataclass(frozen=True)
class LogLine:
    """A line of output, or (``note``) something that flk says about it."""

    message: str
    note: bool = False
    tag: str = ""  # "[rank 3] ": the launcher's prefix of each line; "[pod 1] " for its own lines
    rank: int | None = None
    job: str = ""  # name of the job
    pod: str = ""  # name of the pod
    index: int = 0  # of the pod
    time: str = ""  # when the kubelet has received it, as RFC 3339; empty if unknown
    attempt: int = 0  # number of the attempt, from 1; 0 if unknown

    @property
    def text(self) -> str:
        """The line with its tag."""
        return self.tag + self.message

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `-o json` prints it."""
        return {
            "time": self.time or None,
            "job": self.job,
            "pod": self.pod,
            "rank": self.rank,
            "attempt": self.attempt or None,
            "message": self.message,
        }


def in_short(pods: list[str]) -> str:
    """Return names of pods in short: ``gpt-worker-3 and 40 other pods``."""
    return pods[0] if len(pods) == 1 else f"{pods[0]} and {plural(len(pods) - 1, 'other pod')}"


class LineFilter:
    """The pods and lines of one job that options choose. Raises UsageError for a rank or a pod that the job lacks."""

    def __init__(
        self,
        options: LogOptions,
        job: str,
        names: Sequence[str],
        target: Target,
        processes: int,
        before: set[int] | None = None,
    ) -> None:
        """``names`` are those of the pods, ``processes`` the ranks in each; 0: a rank may be in any pod.

        ``before`` are the pods that were chosen when the job had more of them.
        """
        self.options, self.job, self.names = options, job, names
        self.container = target.container  # the one that trains
        self.fixed_ranks = processes > 0  # each rank is in the same pod in all attempts
        self._target, self._processes = target, processes
        self._indexes: Mapping[str, int] = {name: index for index, name in enumerate(names)}
        self._chosen = {given_pod(job, names, target, pod) for pod in options.pods} if before is None else before

    @classmethod
    def of(cls, view: JobView, options: LogOptions, before: LineFilter | None = None) -> LineFilter:
        """Return the filter for a job. What the filter ``before`` has chosen stays when the job has fewer pods."""
        last = view.sizes[1] * view.processes - 1
        absent = [rank for rank in sorted(options.ranks) if rank > last]
        if absent and before is None:
            raise UsageError(f"--rank: job {view.name} has ranks 0 to {last}, no rank {absent[0]}")
        names = [pod.name for pod in view.pods]
        names += before.names[len(names) :] if before else []
        processes = 0 if view.resizable else view.processes
        return cls(options, view.name, names, view.target, processes, before._chosen if before else None)

    def order(self, pod: Object) -> tuple[int, str]:
        """Return the sort key of a pod: its index, then its age, older pods first."""
        return self.index_of(pod["metadata"]["name"]), str(pod["metadata"].get("creationTimestamp"))

    def base_name(self, name: str) -> str:
        """Return the name of a pod without a random suffix."""
        return name if name in self._indexes else self._target.base_name(name)

    def index_of(self, name: str) -> int:
        """Return the position of the pod of that name in its job; the number of pods for any other name."""
        return self._indexes.get(self.base_name(name), len(self._indexes))

    def wants(self, pod: Object) -> bool:
        """Return whether a pod is chosen, or has one of the chosen ranks."""
        return self.wants_index(self.index_of(pod["metadata"]["name"]))

    def wants_index(self, index: int) -> bool:
        """Return whether the pod at this position is chosen, or has one of the chosen ranks."""
        if self._chosen and index not in self._chosen:
            return False
        if not self.options.ranks or not self.fixed_ranks:
            return True
        return any(rank // self._processes == index for rank in self.options.ranks)

    def lines(self, name: str) -> PodLines:
        """Return the parser of the log of the pod of that name."""
        return PodLines(self, name, self.index_of(name))


class PodLines:
    """Parses the log of one pod, line by line: the attempt of a line follows from the lines before it."""

    def __init__(self, chosen: LineFilter, name: str, index: int) -> None:
        self._chosen, self._name, self._index = chosen, name, index
        self._attempt = 0
        self._begun: LogLine | None = None  # that an attempt has begun, not yet yielded

    def chosen(self, lines: Iterable[tuple[str, str]]) -> Iterator[LogLine]:
        """Yield the chosen ones among lines, pairs of a time and a text: tagged and without control characters."""
        for time, text in lines:
            if line := self._parsed(time, text):
                if self._begun:
                    yield self._begun
                    self._begun = None
                yield line

    def _parsed(self, time: str, text: str) -> LogLine | None:
        options, launcher = self._chosen.options, log_format.LAUNCHER_PREFIX.format(index=self._index)
        number = log_format.parse_attempt(text)
        if number is not None:
            self._attempt = number
            # The launcher of pod 0 announces attempts in words.
            if number > 1 and (options.ranks or (options.pods and self._index)):
                begun = LogLine(f"attempt {number}", tag=launcher, **self._where(time))
                if not options.ranks or self._chosen.fixed_ranks:
                    return begun
                self._begun = begun  # whether a chosen rank is in this pod now, its first line tells
                return None
        if log_format.is_record(text):
            return None
        match = _TAG.match(text)
        rank = int(match[2]) if match and match[1] == "rank" else None
        if options.ranks and match and rank not in options.ranks:
            return None
        tag, message = (match[0], text[match.end() :]) if match else (launcher, text)
        message = printable(message, colour=options.colour)
        return LogLine(message, tag=tag, rank=rank, **self._where(time))

    def _where(self, time: str) -> dict[str, Any]:
        return {
            "job": self._chosen.job,
            "pod": self._name,
            "index": self._index,
            "time": time,
            "attempt": self._attempt,
        }


DELAY: Final = 0.3  # seconds that a line waits for equal ones of other ranks
HELD: Final = 5000  # lines that wait at most


@dataclass
class _Group:
    """Equal lines of different ranks, at the place of the first of them."""

    number: int  # counts all groups
    line: LogLine
    tags: set[str]
    since: float


class Folder:
    """Holds lines briefly and joins equal ones. The lines of each rank keep their order."""

    def __init__(self, *, delay: float = DELAY, held: int = HELD, clock: Callable[[], float] = monotonic) -> None:
        self._delay, self._held, self._clock = delay, held, clock
        self._groups: deque[_Group] = deque()
        # Waiting groups by message, of ranks and of launchers, in order.
        self._equal: dict[tuple[bool, str], list[_Group]] = defaultdict(list)
        self._last: dict[str, int] = {}  # by tag: the number of the last group that has a line of it
        self._count = 0

    def add(self, line: LogLine) -> Iterator[LogLine]:
        """Take a line, and yield those that have waited long enough."""
        group = self._group_for(line)
        if group is None:
            self._count += 1
            group = _Group(self._count, line, set(), self._clock())
            self._groups.append(group)
            if not line.note:
                self._equal[_key(line)].append(group)
        group.tags.add(line.tag)
        self._last[line.tag] = group.number
        yield from self.due()

    def due(self) -> Iterator[LogLine]:
        """Yield the lines that have waited long enough."""
        oldest = self._clock() - self._delay
        while self._groups and (self._groups[0].since <= oldest or len(self._groups) > self._held):
            yield self._pop()

    def rest(self) -> Iterator[LogLine]:
        """Yield all lines that wait."""
        while self._groups:
            yield self._pop()

    def _group_for(self, line: LogLine) -> _Group | None:
        """Return the first waiting group with this message that comes after all earlier lines of the same rank."""
        if line.note:
            return None
        groups = self._equal.get(_key(line), [])
        place = bisect_right(groups, self._last.get(line.tag, 0), key=lambda group: group.number)
        return groups[place] if place < len(groups) else None

    def _pop(self) -> LogLine:
        group = self._groups.popleft()
        if not group.line.note:
            waiting = self._equal[_key(group.line)]
            del waiting[0]
            if not waiting:
                del self._equal[_key(group.line)]
        return replace(group.line, tag=_joined(group.tags)) if len(group.tags) > 1 else group.line


def _key(line: LogLine) -> tuple[bool, str]:
    return line.tag.startswith("[rank"), line.message


def _joined(tags: Iterable[str]) -> str:
    """Return one tag for several of a kind: ``[rank 0] `` and ``[rank 1] `` are ``[ranks 0-1] ``."""
    kinds, numbers = zip(*(tag.strip("[] ").split(" ") for tag in tags), strict=True)
    return f"[{kinds[0]}s {format_ranges(sorted(map(int, numbers)))}] "


class LogPosition:
    """How far one log has been read. ``cut``: the first request leaves out its beginning, as ``--tail`` does."""

    def __init__(self, *, cut: bool = False) -> None:
        self._cut = cut
        self._first = b""  # the first line, if lines before it were left out
        self._skips = False  # these lines come after a resumption, and then the first line
        self._recent: deque[tuple[bytes, bytes]] = deque()  # second and line, of the last two seconds
        self._repeated: Counter[bytes] = Counter()  # lines that come again after a resumption
        self._second = b""
        self._zone = b"Z"

    def resume(self) -> str:
        """Return the time to request the log from, empty for its beginning. Expects the lines since then again."""
        if not self._second:
            return ""
        self._repeated = Counter(line for _, line in self._recent)
        since = _second_before(self._second)
        self._skips = self._first[: len(since)] >= since
        return (since + self._zone).decode()

    def accept(self, line: bytes) -> bool:
        """Return whether a line, with its time stamp, is new: it was not seen, or left out, before a resumption."""
        match = STAMP.match(line)
        if match is None:
            return True  # a message of the kubelet
        if self._skips:
            self._skips = line != self._first and match[2] <= self._first[: len(match[2])]
            if self._skips:
                return False
        if self._repeated.get(line):
            self._repeated[line] -= 1
            return False
        second, self._zone = match[2], match[3]
        if second > self._second:
            self._second = second
            oldest = _second_before(second)
            while self._recent and self._recent[0][0] < oldest:
                self._recent.popleft()
        self._recent.append((second, line))
        if self._cut and not self._first:
            self._first = line
        return True


def stamp_of(seconds: float) -> str:
    """Return the whole second of a time since the epoch, as the API takes it."""
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _second_before(second: bytes) -> bytes:
    return (datetime.fromisoformat(second.decode()) - timedelta(seconds=1)).isoformat().encode()
