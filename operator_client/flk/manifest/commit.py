"""The commit of git that the code of a job was in, for the job's annotation, and how the code differed from it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

TIMEOUT: Final = 5.0  # seconds: a job is submitted without its commit if git takes longer
DIFF_LIMIT: Final = 1 << 16  # characters of a diff that are kept
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}(-dirty)?")


def commit_of(root: Path) -> str:
    """Return the commit that is checked out at ``root``, with ``-dirty`` if tracked files differ from it.

    Empty outside of git, before the first commit, and if git does not answer: a job needs no commit.
    """
    told = _git(root, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty").strip()
    return told if _COMMIT.fullmatch(told) else ""


def diff_of(root: Path) -> str:
    """Return how the tracked files in ``root`` differ from the commit, as `git diff` tells it, at most DIFF_LIMIT.

    Empty where they do not differ, and if git does not answer.
    """
    told = _git(root, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD", "--", ".")
    if len(told) <= DIFF_LIMIT:
        return told
    kept = told[:DIFF_LIMIT].rpartition("\n")[0]
    return f"{kept}\n({len(told) - len(kept):,} more characters are left out)\n"


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; empty if it fails or takes too long."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
