"""The program of the runtime: the launcher of one pod, the check, and the tools for stacks and metrics."""

from __future__ import annotations

import os
import sys

_HELP = """``python -m flk_runtime [--] script.py args``, or ``-m module args``: runs the launcher of one pod.

``python -m flk_runtime check`` runs `flk_runtime.check` instead. ``python -m flk_runtime stacks`` prints the stacks of
all ranks of the job whose launcher runs in this container, and ``metrics`` prints the measurements of the job, both as
JSON. A script with one of these names needs the ``--``.
``--help`` prints this text.
"""  # archives of the runtime have no docstrings


def main() -> None:
    """Run the launcher or the check, and end this process with an `ExitCode`."""
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-h"]):
        print(_HELP)
        return
    if arguments == ["check"]:
        from flk_runtime import check
        from flk_runtime.launcher.processes import rank_process

        if not check.must_launch_ranks():
            os._exit(rank_process.run_exit_handlers(check.main()))
        arguments = ["-m", check.MODULE]
    if arguments in (["stacks"], ["metrics"]):
        from flk_runtime.launcher import control

        sys.exit(control.main(arguments[0]))
    from flk_runtime.launcher import start

    start.main(arguments)


if __name__ == "__main__":
    main()
