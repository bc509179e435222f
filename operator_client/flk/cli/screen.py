"""Screen: text on a terminal that is replaced by newer text, and lines that are cut to the terminal's width."""

from __future__ import annotations

import shutil
from typing import TextIO

_UP: str = "\x1b[{}A"
_CLEAR_BELOW: str = "\x1b[J"


class Screen:
    """The end of a terminal's output, which `show` replaces. Elsewhere than on a terminal nothing is replaced."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self._lines = 0

    def show(self, text: str) -> None:
        """Replace the text that was shown last. Lines are cut to the width and height of the terminal."""
        size = shutil.get_terminal_size()
        lines = [cut(line, size.columns) for line in text.rstrip("\n").split("\n")]
        if len(lines) >= size.lines > 1:
            left = len(lines) - size.lines + 2
            lines = [*lines[: size.lines - 2], cut(f"… and {left} more lines (-o wide without --watch)", size.columns)]
        before = _UP.format(self._lines) + "\r" + _CLEAR_BELOW if self._lines else ""
        self._stream.write(before + "".join(line + "\n" for line in lines))
        self._stream.flush()
        self._lines = len(lines)


def cut(text: str, width: int) -> str:
    """Return a line of at most ``width`` characters; a longer one ends with ``…``. 0 is no limit."""
    return text if not width or len(text) <= width else text[: max(0, width - 1)] + "…"


def width_of(stream: TextIO) -> int:
    """Return the number of columns of a terminal, 0 for anything else."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0
