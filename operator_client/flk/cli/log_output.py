"""LogOutput writes lines of logs to stdout as text or JSON, or to a file for each rank. Its notes go to stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from flk.cli.options import note
from flk.errors import FlkError, UsageError
from flk.local.shown import MetricsText

if TYPE_CHECKING:
    from flk.jobs.logs import LogLine

OPEN_FILES: Final = 64  # files that are open at once


class LogOutput:
    """Writes lines. ``form`` is text or json, ``folder`` (None: stdout) gets a file for each rank and launcher.

    Of ``several`` jobs each line begins with its job's name, and each job has a folder of its own. Several threads may
    use one output, which is closed at the end.
    """

    def __init__(
        self,
        *,
        form: str = "text",
        folder: Path | None = None,
        several: bool = False,
        raw: bool = False,
    ) -> None:
        """On a terminal, lines of metrics are for people, unless ``raw``.

        Raises UsageError if the folder has files already, or cannot be created."""
        self._form, self._folder, self._several = form, folder, several
        self._for_people = form == "text" and folder is None and sys.stdout.isatty() and not raw
        self._metrics: dict[str, MetricsText] = {}  # by the names of jobs
        self._lock = threading.Lock()
        self._files: OrderedDict[str, IO[str]] = OrderedDict()  # by name, the one that was used last at the end
        self._written: set[str] = set()
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if any(folder.iterdir()):
                    raise UsageError(f"--output-folder: {folder} is not empty", hint="name a new folder")
            except OSError as error:
                raise UsageError(f"--output-folder: cannot create {folder}: {error.strerror}") from None

    def write_all(self, lines: Generator[LogLine, None, None], ended: threading.Event | None = None) -> None:
        """Write lines as they come, until ``ended`` is set. The generator is closed then, and if writing fails."""
        with closing(lines):
            for line in lines:
                if ended is not None and ended.is_set():
                    return
                with self._lock:
                    if line.note:
                        note(line.message)
                    else:
                        self._write(line)

    def close(self) -> None:
        """Close the files, and say how many were written. Raises the error of the first that cannot be."""
        errors: list[FlkError] = []
        while self._files:
            try:
                _close(self._files.popitem()[1])
            except FlkError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if self._folder is not None:
            note(f"wrote {len(self._written)} files to {self._folder}")

    def _write(self, line: LogLine) -> None:
        if self._form == "json":
            text = json.dumps(line.to_dict(), ensure_ascii=False)
        else:
            text = line.message if self._folder else f"{line.job} " * self._several + self._shown(line)
        if self._folder is None:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        else:
            file = self._file(self._folder, line)
            try:
                file.write(text + "\n")
            except OSError as error:
                raise _not_written(file.name, error) from None

    def _shown(self, line: LogLine) -> str:
        if not self._for_people:
            return line.text
        return self._metrics.setdefault(line.job, MetricsText()).text(line.text) or line.text

    def _file(self, folder: Path, line: LogLine) -> IO[str]:
        suffix = "jsonl" if self._form == "json" else "log"
        kind, number = ("rank", line.rank) if line.rank is not None else ("pod", line.index)
        name = f"{line.job}/" * self._several + f"{kind}-{number}.{suffix}"
        file = self._files.pop(name, None)
        if file is None:
            if len(self._files) >= OPEN_FILES:
                _close(self._files.popitem(last=False)[1])
            try:
                (folder / name).parent.mkdir(exist_ok=True)
                file = open(folder / name, "a", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close
            except OSError as error:
                raise _not_written(folder / name, error) from None
            self._written.add(name)
        self._files[name] = file
        return file


def _close(file: IO[str]) -> None:
    try:
        file.close()  # which writes what is left
    except OSError as error:
        raise _not_written(file.name, error) from None


def _not_written(path: str | Path, error: OSError) -> FlkError:
    return FlkError(f"--output-folder: {path} cannot be written: {error.strerror}")
