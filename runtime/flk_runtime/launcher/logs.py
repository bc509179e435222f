"""Lines of the ranks, each with its rank before it, on the launcher's own stdout and stderr."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from flk_runtime.system.report import write_all

# A progress bar ends its lines with a carriage return alone; it has to show while it moves.
_END = re.compile(rb"\r\n|\n|\r(?!$)")
AT_ONCE = 50  # lines; more are counted, and what has to come between them is written, after so many
LONGEST = 1 << 16  # bytes; a longer line is passed on in pieces, so that memory stays bounded


@contextlib.contextmanager
def stderr_set_aside(log: Path) -> Iterator[int]:
    """A descriptor for this process's stderr, while what writes to descriptor 2 itself goes to a file.

    torch's store writes a C++ stack trace there whenever a connection ends, which here is nothing out of the ordinary;
    its exceptions say the same.
    """
    stderr = os.dup(2)
    aside = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(aside, 2)
    os.close(aside)
    try:
        yield stderr
    finally:
        os.dup2(stderr, 2)


class Prefixer:
    """Cuts a stream of bytes into lines and passes them on with a tag before each, whole lines in one write."""

    def __init__(self, tag: str, fd: int, count: Callable[[int], None] = lambda lines: None) -> None:
        self._tag = tag.encode()
        self._fd = fd
        self._rest = b""
        self._count = count

    def feed(self, data: bytes) -> None:
        """Pass on every line that ``data`` completes."""
        lines = _END.split(self._rest + data)
        self._rest = lines.pop()
        while len(self._rest) > LONGEST:
            lines.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        self._write(lines)

    def end(self) -> None:
        """Pass on what is left when the stream has ended without a newline."""
        if self._rest:
            self._write([self._rest.rstrip(b"\r")])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        for begin in range(0, len(lines), AT_ONCE):
            some = lines[begin : begin + AT_ONCE]
            write_all(self._fd, b"".join(self._tag + line + b"\n" for line in some))
            self._count(len(some))
