"""The commit of git that the code of a job was in, for the job's annotation."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

TIMEOUT: Final = 5.0  # seconds: a job is submitted without its commit if git takes longer
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}(-dirty)?")


def commit_of(root: Path) -> str:
    """Return the commit that is checked out at ``root``, with ``-dirty`` if tracked files differ from it.

    Empty outside of git, before the first commit, and if git does not answer: a job needs no commit.
    """
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    told = done.stdout.decode(errors="replace").strip()
    return told if done.returncode == 0 and _COMMIT.fullmatch(told) else ""
