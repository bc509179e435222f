"""Output: reads the pipes of the ranks, prefixes each line, and writes all of it to the streams of the launcher.

A thread writes, so that a stalled reader blocks neither signals nor the rendezvous.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flk_runtime.contract.secrets import hidden
from flk_runtime.system import host

_FULL = 1 << 20  # bytes that wait to be written, above which the ranks' output is no longer read
_FREE = _FULL // 4  # bytes below which it is read again
_CHUNK = 1 << 16  # bytes that are read or written at once
_RECENT = 30  # latest writes that are kept; each holds whole lines


class Output:
    """Standard output and standard error of this process, in the order in which they are written."""

    def __init__(self, stdout: int, stderr: int, has_room: Callable[[], None]) -> None:
        """Start the thread. ``has_room`` is called, in that thread, when ``is_full`` becomes false."""
        self._stdout = stdout
        self._stderr = stderr
        self._has_room = has_room
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()  # descriptor and data
        self._size = 0  # bytes that wait or are being written
        self._recent: collections.deque[bytes] = collections.deque(maxlen=_RECENT)
        self._changed = threading.Condition()
        self.is_full = False
        """Whether the buffer is full; callers that can block should wait."""
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def write_stdout(self, data: bytes) -> None:
        """Write to standard output, later if it does not take the data now."""
        self._put(self._stdout, data)

    def write_stderr(self, data: bytes) -> None:
        """Write to standard error, later if it does not take the data now."""
        self._put(self._stderr, data)

    def flush(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until everything is written. Returns whether everything is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._size == 0, timeout)

    def last_lines(self, number: int) -> list[str]:
        """Return the last lines that were given to this object, at most ``number``, from any thread."""
        with self._changed:
            pieces = list(self._recent)
        return b"".join(pieces).decode(errors="replace").splitlines()[-number:]

    def _put(self, fd: int, data: bytes) -> None:
        with self._changed:
            self._recent.append(data)
            self._waiting.append((fd, data))
            self._size += len(data)
            self.is_full = self.is_full or self._size > _FULL
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                fd, first = self._waiting.popleft()
                parts, size = [first], len(first)
                while self._waiting and self._waiting[0][0] == fd and size < _CHUNK:
                    parts.append(self._waiting.popleft()[1])
                    size += len(parts[-1])
            host.write_all(fd, b"".join(parts))
            with self._changed:
                self._size -= size
                has_room = self.is_full and self._size < _FREE
                self.is_full = self.is_full and not has_room
                self._changed.notify_all()
            if has_room:
                self._has_room()


# A progress bar ends its lines with a carriage return alone; each state of it is passed on at once.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!$)")
_PIPE_LIMIT = 1 << 20  # bytes that a pipe can contain (pipe(7): pipe-max-size)
LINES_PER_WRITE = 50  # lines after which at the latest the lines are counted, which may write a job record
TAIL_LINES, TAIL_LINE_LIMIT = 80, 400  # last lines of a stream that are kept, and bytes of each
LINE_LIMIT = 1 << 16  # bytes; a longer line is split, so that memory stays bounded


@contextlib.contextmanager
def redirected_stderr(log: Path) -> Iterator[int]:
    """Redirect descriptor 2 of this process to the file ``log``, and yield a descriptor of the real stderr.

    torch's store writes a C++ stack trace to descriptor 2 whenever a connection closes, which happens in every job. Its
    exceptions contain the same information.
    """
    stderr = os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield stderr
    finally:
        os.dup2(stderr, 2)


class Prefixer:
    """Splits a stream of bytes into lines and writes each with a prefix, several whole lines in one write."""

    def __init__(
        self,
        prefix: str,
        write: Callable[[bytes], None],
        count: Callable[[int], None] = lambda lines: None,
        look: Callable[[bytes], None] | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        """``write`` receives whole lines; ``count`` is called with the number of lines written.

        ``look`` gets each line that begins like an object of JSON; None: nobody looks. ``secrets``, and passwords in
        addresses, are hidden in lines.
        """
        self._secrets = [os.fsencode(each) for each in secrets]
        self._look = look
        self._prefix = prefix.encode()
        self._write_lines = write
        self._rest = b""
        self._count = count
        self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> str:
        """The last 80 lines, each cut to 400 bytes."""
        return b"\n".join(self._tail).decode(errors="replace")

    def feed(self, data: bytes) -> None:
        """Write every line that ``data`` completes."""
        lines = _LINE_END.split(self._rest + data)
        self._rest = lines.pop()
        while len(self._rest) > LINE_LIMIT:
            lines.append(self._rest[:LINE_LIMIT])
            self._rest = self._rest[LINE_LIMIT:]
        self._write(lines)

    def end(self) -> None:
        """Write the last line if the stream has ended without a newline."""
        if self._rest:
            self._write([self._rest.rstrip(b"\r")])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        for begin in range(0, len(lines), LINES_PER_WRITE):
            batch = [hidden(line, self._secrets) for line in lines[begin : begin + LINES_PER_WRITE]]
            self._tail.extend(line[:TAIL_LINE_LIMIT] for line in batch)
            self._write_lines(b"".join(self._prefix + line + b"\n" for line in batch))
            self._count(len(batch))
            if self._look:
                for line in batch:
                    if line.startswith(b"{"):
                        self._look(line)


class RankPipes:
    """The three pipes of one rank: its stdout and stderr, and the one on which it reports its exception."""

    def __init__(self, stdout: Prefixer, stderr: Prefixer) -> None:
        """Raises OSError where this process may open no more files."""
        self._targets: dict[int, Prefixer | None] = {}  # by descriptor to read from; None for the reports
        self.write_ends: list[int] = []  # for the rank: stdout, stderr, reports
        self._report = b""
        self._stderr = stderr
        for target in (stdout, stderr, None):
            try:
                read, write = os.pipe()
            except OSError:
                for fd in (*self._targets, *self.write_ends):
                    os.close(fd)
                raise
            os.set_blocking(read, False)
            self._targets[read] = target
            self.write_ends.append(write)

    @property
    def read_ends(self) -> list[int]:
        """The descriptors that are still open for reading."""
        return list(self._targets)

    @property
    def output_ends(self) -> list[int]:
        """The descriptors of stdout and stderr that are still open for reading."""
        return [fd for fd, target in self._targets.items() if target]

    @property
    def stderr_tail(self) -> str:
        """The last lines of stderr."""
        return self._stderr.tail

    def write_stderr(self, text: str) -> None:
        """Write text as if the rank had written it to stderr; the pipes may be closed."""
        self._stderr.feed(text.encode(errors="replace"))

    def close_write_ends(self) -> None:
        """Close the launcher's copies of the rank's ends of the pipes. Call when the rank has started."""
        for fd in self.write_ends:
            os.close(fd)
        self.write_ends.clear()

    def read(self, fd: int) -> bool:
        """Pass on the bytes that a pipe contains now. Returns False at its end."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        target = self._targets[fd]
        if target:
            target.feed(data)
        else:
            self._report += data
        return bool(data)

    def read_rest_and_close(self, fd: int) -> None:
        """Pass on the bytes that a pipe still contains, and close it. Another process may still write into it."""
        for _ in range(_PIPE_LIMIT // _CHUNK):
            if not self.read(fd):
                break
        self.close(fd)

    def close(self, fd: int) -> None:
        """Close a pipe."""
        target = self._targets.pop(fd)
        if target:
            target.end()
        os.close(fd)

    def take_report(self) -> bytes | None:
        """The last line of a report that is complete, or None."""
        if not self._report.endswith(b"\n"):
            return None
        report, self._report = self._report, b""
        return report.splitlines()[-1]
