"""The commit of git that the code of a job was in, for the job's annotation, and how the code differed from it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

from flk.manifest.git import ask_git

TIMEOUT: Final = 5.0  # seconds: a job is submitted without its commit if git takes longer
DIFF_LIMIT: Final = 1 << 16  # characters of a diff that are kept
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
# Without programs that show differences, and without entering submodules, which have configurations of their own.
_DIFF: Final = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
_OF_FOLDER: Final = ("local", "worktree")  # scopes of git's configuration
_NO_FILTER: Final = ("clean=", "smudge=", "process=", "required=false")


def commit_of(root: Path) -> str:
    """Return the commit that is checked out at ``root``, with ``-dirty`` if tracked files differ from it.

    Empty outside of git, before the first commit, and if git does not answer: a job needs no commit.
    """
    told, filters = _told(root, "rev-parse", "--verify", "HEAD"), _without_filters(root)
    if told is None or filters is None or not _COMMIT.fullmatch(told.strip()):
        return ""
    same = _told(root, *filters, *_DIFF, "--quiet", "HEAD") is not None
    return told.strip() if same else f"{told.strip()}-dirty"


def diff_of(root: Path) -> str:
    """Return how the tracked files in ``root`` differ from the commit, as `git diff` tells it, at most DIFF_LIMIT.

    Empty where they do not differ, and if git does not answer.
    """
    filters = _without_filters(root)
    # The folder by its path: its configuration may name another folder, of which no file is read.
    told = None if filters is None else _told(root, *filters, *_DIFF, "HEAD", "--", str(root))
    if told is None or len(told) <= DIFF_LIMIT:
        return told or ""
    kept = told[:DIFF_LIMIT].rpartition("\n")[0]
    return f"{kept}\n({len(told) - len(kept):,} more characters are left out)\n"


def _without_filters(root: Path) -> list[str] | None:
    """Return the options without which git reads files through programs that the folder's configuration names.

    None if git does not say which these are. The user's own filters, such as those of Git LFS, stay.
    """
    told = _told(root, "config", "--list", "--null", "--show-scope", "--name-only")
    if told is None:
        return None
    words = told.split("\0")
    names = {
        name.rpartition(".")[0]
        for scope, name in zip(words[::2], words[1::2], strict=False)
        if scope in _OF_FOLDER and name.startswith("filter.")
    }
    if any("=" in name for name in names):  # which no option can name
        return None
    return [word for name in sorted(names) for end in _NO_FILTER for word in ("-c", f"{name}.{end}")]


def _told(root: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails or takes too long."""
    try:
        done = ask_git(root, *arguments, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
