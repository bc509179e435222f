"""``python -m flk_runtime [--] script.py args``, or ``-m module args``: the parent of the ranks of one pod.

``python -m flk_runtime check`` tries a job's start instead; a script of that name is ``-- check``.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Start the launcher; it ends this process with a code of the contract."""
    arguments = sys.argv[1:]
    if arguments == ["check"]:
        from flk_runtime import check
        from flk_runtime.launcher import worker

        if not check.is_pod():
            os._exit(worker.run_exit_handlers(check.main()))
        arguments = ["-m", check.MODULE]
    from flk_runtime.launcher import start

    start.main(arguments)


if __name__ == "__main__":
    main()
