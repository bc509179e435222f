"""Entry point of the commands `flk` and `kubectl-flk`: runs a command line, prints an error, returns the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flk.errors import FlkError
from flk.terminal import one_line
from flk_runtime.contract import VERSION, ExitCode

PIPE_CLOSED = 141  # exit code that a shell shows for a program that SIGPIPE has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words in (["--version"], ["-V"]):  # without importing Typer: scripts call it often
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
        # The reader of stdout has ended, as `head` does. The interpreter must not flush the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    return code


def report(error: FlkError) -> None:
    """Print an error on stderr: a line of what went wrong and why, and a line of what to do next."""
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    red, cyan, plain = ("\033[31m", "\033[36m", "\033[0m") if coloured else ("", "", "")
    print(f"{red}error:{plain} {one_line(str(error))}", file=sys.stderr)
    if error.hint:
        print(f"{cyan}hint:{plain} {one_line(error.hint)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
