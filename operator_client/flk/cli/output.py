"""What commands print: JSON that every parser reads, aligned tables, and lines that fit a terminal."""

from __future__ import annotations

import json
import shutil
import textwrap
import threading
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from flk.spec.units import number_text, short_duration

if TYPE_CHECKING:
    from flk.jobs.state import State
    from flk.observe.progress import Progress


def json_text(data: Any) -> str:
    """Return data as JSON. A number that JSON cannot have is a string: "NaN", "Infinity" or "-Infinity"."""
    try:
        return json.dumps(data, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(data), parse_constant=str), indent=2)


def items_text(items: list[dict[str, Any]]) -> str:
    """Return the data of several jobs' states as JSON."""
    from flk.jobs.state import SCHEMA

    return json_text({"schema": SCHEMA, "items": items})


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, without: Container[str] = (), width: int = 0
) -> list[str]:
    """Return lines whose columns are as wide as their widest cell, as kubectl's. An empty cell becomes ``-``.

    Columns whose titles are among ``without`` are left out. Where the table is wider than ``width`` (0: no limit), the
    last cell of a row stands below it: it says why.
    """
    cells = [list(header), *([cell or "-" for cell in row] for row in rows)]
    shown = [column for column, title in enumerate(header) if title not in without]
    if width and sum(max(len(row[column]) for row in cells) + 3 for column in shown) - 3 > width:
        without = {title for title in header if title in without} | {header[shown[-1]]}
        lines = table(header, rows, without=without)
        last = [row[shown[-1]] for row in rows]
        below = (["  " + cell] if cell else [] for cell in last)
        return [lines[0], *(part for line, why in zip(lines[1:], below, strict=True) for part in (line, *why))]
    widths = {column: max(len(row[column]) for row in cells) for column in shown}
    return ["   ".join(row[column].ljust(width) for column, width in widths.items()).rstrip() for row in cells]


def progress_line(state: State) -> str:
    """Return one line about how far a job is: pods, attempt, and its pace."""
    parts = [f"{state.ready}/{state.replicas} pods"]
    if state.attempts:
        parts.append(f"attempt {state.attempt}")
    if state.progress:
        parts += pace(max(state.progress, key=lambda progress: progress.step), state.finished)
    return ", ".join(parts)


def pace(progress: Progress, finished: bool) -> list[str]:
    """Return what is known of the pace of a job, each in a few words: step, rate, shares, loss, remaining time."""
    parts = [f"step {progress.step:,}" + (f" of {progress.total:,}" if progress.total else "")]
    if progress.step_time:  # 0.0: too short to tell
        parts.append(f"{progress.step_time:.3g} s/step")
    if progress.samples_per_s is not None:
        parts.append(f"{number_text(progress.samples_per_s)} samples/s")
    for share, what in (
        (progress.mfu, "MFU"),
        (progress.communication, "communication"),
        (progress.data_wait, "waiting for data"),
    ):
        if share is not None:
            parts.append(f"{share:.0%} {what}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.remaining is not None and not finished:
        parts.append(f"{short_duration(progress.remaining)} left")
    return parts


_CLEAR: str = "\r\x1b[K"


class ProgressLine:
    """One line that each state replaces. Elsewhere than on a terminal nothing is written.

    Of ``several`` jobs it has the progress of each. Several threads may use one line.
    """

    def __init__(self, stream: TextIO, *, several: bool = False) -> None:
        self._stream, self._several = stream, several
        self._is_terminal = stream.isatty()
        self._progress: dict[str, str] = {}  # by the UID of the job
        self._shown = ""
        self.lock = threading.RLock()

    def show(self, state: State) -> None:
        """Replace the line."""
        if not self._is_terminal:
            return
        with self.lock:
            self._progress[state.uid] = f"{state.name}: " * self._several + progress_line(state)
            self._write("; ".join(self._progress.values()))

    def drop(self, state: State) -> None:
        """Leave out a job that has ended."""
        with self.lock:
            if self._progress.pop(state.uid, None) is not None:
                self._write("; ".join(self._progress.values()))

    def clear(self) -> None:
        """Remove the line, so that something else can be written."""
        with self.lock:
            if self._shown:
                self._stream.write(_CLEAR)
                self._stream.flush()
                self._shown = ""

    def _write(self, text: str) -> None:
        if text != self._shown:
            width = max(0, shutil.get_terminal_size().columns - 1)  # a full line would begin another one
            self._stream.write(_CLEAR + cut(text, width))
            self._stream.flush()
            self._shown = text


_STYLES: Final = {
    **dict.fromkeys(("Stuck", "Failed"), "bad"),
    **dict.fromkeys(("Restarting", "Preempted", "Pending", "Queued", "Terminating"), "warn"),
    "Succeeded": "good",
}


def phase_style(phase: str) -> str:
    """Return the style of a phase of a job, as `flk.user.terminal.styled` takes it."""
    return _STYLES.get(phase, "")


def cut(text: str, width: int) -> str:
    """Return a line of at most ``width`` characters; a longer one ends with ``…``. 0 is no limit."""
    return text if not width or len(text) <= width else text[: max(0, width - 1)] + "…"


def width_of(stream: TextIO) -> int:
    """Return the number of columns of a terminal, 0 for anything else."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0


def wrapped(line: str, width: int) -> list[str]:
    """Return a line as lines of at most ``width`` characters, broken between words and as far indented. 0: no limit."""
    if not width or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" ")))
    return textwrap.wrap(
        line, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [line]
