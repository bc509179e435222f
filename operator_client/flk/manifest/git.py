"""What git says about the user's folder: its commit, and what `.flkignore` excludes.

The folder may be an unpacked archive of somebody else, with its ``.git``. What it says about files counts; what it says
about programs does not.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Final

from flk.errors import UsageError

# Read after the folder's configuration: no monitor of files, and no hooks.
_SETTINGS: Final = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
# No command for a remote, of which a partial clone gets what it lacks, and no index is written, of which a hook hears.
_ENVIRONMENT: Final = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}

# What git sets for hooks and other programs that it starts: the folder asked about may be of another repository.
_OF_CALLER: Final = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")


def ask_git(root: Path, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder, and return how it ended. Raises OSError without git, and subprocess.TimeoutExpired."""
    command = ["git", "-C", str(root), *_SETTINGS, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_CALLER} | _ENVIRONMENT
    return subprocess.run(command, capture_output=True, check=False, timeout=timeout, env=environment)


TIMEOUT: Final = 5.0  # seconds: a job is submitted without its commit if git takes longer
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
# Without programs that show differences, and without entering submodules, which have configurations of their own.
_DIFF: Final = ("diff", "--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD")
_OF_FOLDER: Final = ("local", "worktree")  # scopes of git's configuration
_NO_FILTER: Final = ("clean=", "smudge=", "process=", "required=false")


def commit_of(root: Path) -> str:
    """Return the commit that is checked out at ``root``, with ``-dirty`` if tracked files differ from it.

    Empty outside of git, before the first commit, and if git does not answer: a job needs no commit.
    """
    told, filters = _told(root, "rev-parse", "--verify", "HEAD"), _without_filters(root)
    if told is None or filters is None or not _COMMIT.fullmatch(told.strip()):
        return ""
    return told.strip() + ("-dirty" if _told(root, *filters, *_DIFF) is None else "")


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


IGNORE_FILE: Final = ".flkignore"  # patterns in the syntax of `.gitignore`


def excluded(root: Path, paths: Collection[str]) -> set[str]:
    """Return those of ``paths``, which are relative to the root, that the root's `.flkignore` excludes.

    Raises UsageError if there is such a file and git cannot read it.
    """
    if not paths or not (root / IGNORE_FILE).is_file():
        return set()
    with tempfile.TemporaryDirectory(prefix="flk-") as empty:
        # An empty repository beside an empty work tree: no other patterns count, and a tracked file may be ignored.
        git = [
            "git",
            "--git-dir",
            f"{empty}/git",
            "--work-tree",
            empty,
            "-c",
            f"core.excludesFile={root / IGNORE_FILE}",
        ]
        _run(root, ["git", "init", "-q", "--bare", "--template=", f"{empty}/git"], empty)
        # A name may begin with a colon, which has a meaning for git.
        given = b"\0".join(b"./" + os.fsencode(path) for path in sorted(paths))
        found = _run(root, [*git, "check-ignore", "--no-index", "-z", "--stdin"], empty, given)
    return {os.fsdecode(path.removeprefix(b"./")) for path in found.split(b"\0") if path}


def _run(root: Path, command: list[str], folder: str, given: bytes = b"") -> bytes:
    try:
        done = subprocess.run(command, cwd=folder, input=given, capture_output=True)
    except OSError:
        raise UsageError(
            f"{root / IGNORE_FILE} needs git, which is not installed", hint="install git, or --no-ship"
        ) from None
    if done.returncode > 1:  # 1: nothing is ignored
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"git cannot read {root / IGNORE_FILE}: {said[0] if said else 'no reason given'}")
    return done.stdout
