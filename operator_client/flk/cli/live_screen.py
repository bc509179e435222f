"""LiveScreen: the whole terminal, for a view that is drawn again and again, takes keys, and restores it at its end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flk.user.terminal import STYLES, exit_on_signal, handled_signals, has_colours

if TYPE_CHECKING:
    from flk.cli.top_text import Line

_ENTER: Final = "\x1b[?1049h\x1b[?25l"  # another screen, without a cursor
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_KEY: Final = re.compile(rb"\x1b[\[O][0-?]*[@-~]|.", re.DOTALL)
_KEYS: Final = {
    b"\x1b[A": "k",
    b"\x1b[B": "j",
    b" ": "page down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1bOA": "k",
    b"\x1bOB": "j",
}


class LiveScreen:
    """A terminal on stdin and stdout. NO_COLOR leaves out styles."""

    def __init__(self) -> None:
        self._coloured = has_colours(sys.stdout)
        self._typed: list[bytes] = []  # keys that were read and not yet returned, as of one that is held down

    @contextlib.contextmanager
    def opened(self) -> Iterator[LiveScreen]:
        """Take the terminal inside the block. Ctrl-C still raises KeyboardInterrupt, and SIGTERM and SIGHUP SystemExit.

        While Ctrl-Z stops the process, the terminal is as it was before.
        """
        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)

        def enter() -> None:
            tty.setcbreak(file)
            self._write(_ENTER)

        def leave() -> None:
            self._write(_LEAVE)
            termios.tcsetattr(file, termios.TCSADRAIN, before)

        def stop(number: int, _: object) -> None:
            leave()
            signal.raise_signal(signal.SIGSTOP)
            enter()

        with handled_signals({signal.SIGTERM: exit_on_signal, signal.SIGHUP: exit_on_signal, signal.SIGTSTP: stop}):
            try:
                enter()
                yield self
            finally:
                leave()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines now."""
        try:
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return 80, 24
        return columns or 80, lines or 24

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines, of which no more than the terminal's are drawn, from its top."""
        texts = [self._styled(line) + _CLEAR_LINE for line in lines[: self.size[1]]]
        self._write(_HOME + "\n".join(texts) + _CLEAR_BELOW)

    def key(self, seconds: float) -> str:
        """Wait for a key, and return it: a character, "page up" or "page down"; empty if none came, or stdin ended."""
        file = sys.stdin.fileno()
        if not self._typed and select.select([file], [], [], seconds)[0]:
            self._typed = _KEY.findall(os.read(file, 1024)) or [b"q"]  # the terminal is gone
        if not self._typed:
            return ""
        data = self._typed.pop(0)
        return _KEYS.get(data, data[:1].decode(errors="replace"))

    def _styled(self, line: Line) -> str:
        style = STYLES.get(line.style, "") if self._coloured else ""
        return f"{style}{line.text}\x1b[0m" if style else line.text

    def _write(self, text: str) -> None:
        """Write at once: a handler of signals writes too, and Python's buffer refuses that in the middle of a write."""
        data, raw = text.encode(sys.stdout.encoding, "replace"), getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
        while data:
            data = data[raw.write(data) or 0 :]
