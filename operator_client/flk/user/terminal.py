"""Make text from elsewhere (logs, exceptions, a cluster) safe to print, print errors, and handle signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from flk.errors import FlkError

_COLOUR: Final = r"\x1b\[[0-9;]*m"
# Escape sequences that move the cursor, set titles or make the terminal answer.
_SEQUENCE: Final = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x1b\\|\x07|$)|\x1b[ -/]*[0-~]"
# All other control characters but the tab, the marks that change the direction of writing, ends of lines of Unicode,
# blanks without a width, and halves of characters, which cannot be written.
_CONTROL: Final = r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
_ALL: Final = f"{_SEQUENCE}|{_CONTROL}"
_ALL_BUT_COLOURS: Final = f"({_COLOUR})|{_SEQUENCE}|{_CONTROL}"


def printable(text: str, *, colour: bool = False) -> str:
    """Return one line of text without control characters. ``colour`` keeps ANSI colours and ends them at the end."""
    if text.isascii() and text.isprintable():
        return text
    if colour:
        kept = re.sub(_ALL_BUT_COLOURS, lambda match: match[1] or "", text)
        return kept + ("\x1b[0m" if "\x1b[" in kept else "")
    return re.sub(_ALL, "", text)


def printable_lines(lines: Iterable[str]) -> str:
    """Return lines without control characters as text."""
    return "".join(f"{printable(line)}\n" for line in lines)


def one_line(text: str) -> str:
    """Return text as one printable line, with single blanks instead of line ends and tabs."""
    return printable(" ".join(text.split()))


STYLES: Final = {"bold": "\x1b[1m", "good": "\x1b[32m", "bad": "\x1b[31m", "warn": "\x1b[33m", "dim": "\x1b[2m"}


def has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours. NO_COLOR and TERM=dumb ask for none."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return text in one of STYLES where a stream shows colours, else unchanged."""
    return f"{STYLES[style]}{text}\x1b[0m" if style and has_colours(stream) else text


def print_error(error: FlkError, *, hint: bool = True, about: str = "") -> None:
    """Print an error on stderr: a line of what went wrong and why, and (``hint``) a line of what to do next.

    ``about`` stands before it. Several mistakes in one request have a line each.
    """
    lines = []
    for mistake in error.mistakes or [error]:
        lines.append(f"{styled('error:', 'bad', sys.stderr)} {about}{one_line(str(mistake))}\n")
        if mistake.hint and hint:
            lines.append(f"{styled('hint:', 'good', sys.stderr)} {one_line(mistake.hint)}\n")
    sys.stderr.write("".join(lines))  # in one piece: threads may print at once
    sys.stderr.flush()


@contextlib.contextmanager
def handled_signals(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    """Call a handler for each of these signals inside the block."""
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def exit_on_signal(number: int, _: Any) -> None:
    """Handle a signal by SystemExit, so that the process restores the terminal before it ends."""
    sys.exit(128 + number)
