"""ProgressLine: the last line of a terminal while flk waits, which shows how far the job is."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, TextIO

from flk.cli.screen import cut

if TYPE_CHECKING:
    from flk.jobs.state import State

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
        from flk.jobs.wait import progress_text

        with self.lock:
            self._progress[state.uid] = f"{state.name}: " * self._several + progress_text(state)
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
