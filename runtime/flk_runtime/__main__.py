"""``python -m flk_runtime [--] script.py args``, or ``-m module args``: the parent of the ranks of one pod."""

from __future__ import annotations

import sys


def main() -> None:
    """Start the launcher; it ends this process with a code of the contract."""
    from flk_runtime import launch

    launch.main(sys.argv[1:])


if __name__ == "__main__":
    main()
