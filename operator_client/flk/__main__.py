"""The commands `flk` and `kubectl-flk`: the entry, and the place where an error becomes two lines and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flk.errors import FlkError
from flk_runtime.contract import VERSION, ExitCode

PIPE_CLOSED = 141  # what a shell shows for a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words in (["--version"], ["-V"]):  # the most frequent call of scripts: not worth the import of Typer
            print(f"flk {VERSION}")
            code = int(ExitCode.DONE)
        else:
            from flk.cli import call

            code = call(words)
        sys.stdout.flush()
    except FlkError as error:
        report(error)
        code = int(error.code)
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output (`| head`) has enough. The interpreter must not try to flush the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    return code


def report(error: FlkError) -> None:
    """Print an error for people: one line of what and why, one of what to do next, on stderr."""
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    red, cyan, plain = ("\033[31m", "\033[36m", "\033[0m") if coloured else ("", "", "")
    print(f"{red}error:{plain} {_one_line(str(error))}", file=sys.stderr)
    if error.hint:
        print(f"{cyan}hint:{plain} {_one_line(error.hint)}", file=sys.stderr)


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
