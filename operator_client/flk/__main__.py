"""Entry point of the commands `flk` and `kubectl-flk`: runs a command line, prints an error, returns the exit code."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from flk.errors import FlkError
from flk.user.terminal import print_error
from flk_runtime.contract import VERSION, ExitCode

PIPE_CLOSED = 141  # exit code that a shell shows for a program that SIGPIPE has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the arguments of this process) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _guard_streams()
    if arguments is None:  # the process is this command's alone
        # Most of what a command makes stays until its end: looking for garbage in it takes time and finds little.
        gc.set_threshold(50_000)
        atexit.register(gc.freeze)  # the end of an interpreter looks for garbage among all objects, several times
    try:
        if words in (["--version"], ["-V"]):  # without importing Typer: scripts call it often
            print(f"flk {VERSION}")
            code = int(ExitCode.DONE)
        else:
            from flk.cli import call

            code = call(words)
    except FlkError as error:
        print_error(error)
        code = int(error.code)
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # what is left of what was being done
            print(f"flk: interrupted: {interrupt}", file=sys.stderr)
        code = int(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has ended, as `head` does
        code = PIPE_CLOSED
    if code == ExitCode.INTERRUPTED and arguments is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends the process at once, without a traceback
    flushed = _flush()
    return code or flushed


def _flush() -> int:
    """Write the buffered output, and return the exit code that the write leads to."""
    try:
        sys.stdout.flush()
    except FlkError as error:
        print_error(error)
        return int(error.code)
    except BrokenPipeError:
        return PIPE_CLOSED
    return int(ExitCode.DONE)


def _guard_streams() -> None:
    """Open /dev/null in place of closed standard streams, and keep failing ones from ending in a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - used until the process ends
    for name, raw in (("stdout", _Stdout), ("stderr", _Stderr)):
        stream = getattr(sys, name)
        # A caller in this process may have put another stream there.
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _with_raw(stream, raw(stream.fileno(), "w", closefd=False)))


def _with_raw(stream: io.TextIOWrapper, raw: Any) -> io.TextIOWrapper:
    """Return a copy of a text stream that writes its bytes to ``raw``."""
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        # Not every encoding has every character, and that of the locale C not even with "surrogateescape".
        errors="replace" if stream.errors in ("strict", "surrogateescape") else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Stdout(io.FileIO):
    """The raw stdout. A failed write raises FlkError, so it cannot be confused with another OSError."""

    def write(self, data: Any) -> int:
        """Write bytes. Raises FlkError, or BrokenPipeError where the reader has ended."""
        if not data:
            return 0  # Typer tries whether a stream takes bytes, and would swallow the error
        try:
            return super().write(data)
        except OSError as error:
            # The interpreter flushes what is left at its exit. That must not fail again.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if isinstance(error, BrokenPipeError):
                raise
            raise FlkError(f"cannot write to stdout: {(error.strerror or str(error)).lower()}") from None


class _Stderr(io.FileIO):
    """The raw stderr. A failed write is ignored: it changes neither what a command does nor its exit code."""

    def write(self, data: Any) -> int:
        """Write bytes, or drop them if the write fails."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


if __name__ == "__main__":
    sys.exit(main())
