"""LogPosition: how far a pod's log has been read, so that a broken stream goes on without a lost or a doubled line.

Lines carry the kubelet's time stamps, but the API continues a log from a whole second only. So a log is requested again
from a second before its last line, and lines that were seen before are dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from datetime import datetime, timedelta, timezone

from flk.observe.stamps import STAMP


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
