"""ProgressLine: the last line of a terminal while flk waits, which shows how far the job is."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, TextIO

from flk.cli.screen import cut
from flk.units import short_duration
from flk_runtime.contract.ranges import plural

if TYPE_CHECKING:
    from flk.jobs.state import State

_CLEAR: str = "\r\x1b[K"


class ProgressLine:
    """One line that each state replaces. Elsewhere than on a terminal nothing is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._shown = ""

    def show(self, state: State) -> None:
        """Replace the line."""
        text = progress_text(state)
        if self._is_terminal and text != self._shown:
            width = max(0, shutil.get_terminal_size().columns - 1)  # a full line would begin another one
            self._stream.write(_CLEAR + cut(text, width))
            self._stream.flush()
            self._shown = text

    def clear(self) -> None:
        """Remove the line, so that something else can be written."""
        if self._shown:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._shown = ""


def progress_text(state: State) -> str:
    """Return how far a job is: pods, attempt, step, rate, loss, remaining time, as far as they are known."""
    parts = [f"{state.ready}/{plural(state.replicas, 'pod')} ready"]
    if state.attempt > 1:
        parts.append(f"attempt {state.attempt}")
    known = max(state.progress, key=lambda progress: progress.step, default=None)
    if known is not None:
        parts.append(f"step {known.step:,}" + (f" of {known.total:,}" if known.total else ""))
        if known.step_time:
            parts.append(f"{1 / known.step_time:.3g} steps/s")
        if known.loss is not None:
            parts.append(f"loss {known.loss:.4g}")
        if known.remaining:
            parts.append(f"{short_duration(known.remaining)} left")
    return ", ".join(parts)
