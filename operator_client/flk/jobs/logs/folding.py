"""Folder: shows equal lines of several ranks as one line, ``[ranks 0-7] …``, without changing the order of any rank."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from flk.jobs.logs.lines import LogLine
from flk_runtime.contract.ranges import format_ranges

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

    def __init__(self, *, delay: float = DELAY, held: int = HELD, clock: Callable[[], float] = time.monotonic) -> None:
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
