"""`.flkignore`: which files do not travel with a job, as patterns in the syntax of `.gitignore`, which git reads."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Final

from flk.errors import UsageError

NAME: Final = ".flkignore"


def ignored(root: Path, paths: Collection[str]) -> set[str]:
    """Return those of ``paths``, which are relative to the root, that the root's `.flkignore` excludes.

    Raises UsageError if there is such a file and git cannot read it.
    """
    if not paths or not (root / NAME).is_file():
        return set()
    with tempfile.TemporaryDirectory(prefix="flk-") as empty:
        # An empty repository beside an empty work tree: no other patterns count, and a tracked file may be ignored.
        git = ["git", "--git-dir", f"{empty}/git", "--work-tree", empty, "-c", f"core.excludesFile={root / NAME}"]
        _run(root, ["git", "init", "-q", "--bare", "--template=", f"{empty}/git"], empty)
        # A name may begin with a colon, which has a meaning for git.
        given = b"\0".join(b"./" + os.fsencode(path) for path in sorted(paths))
        found = _run(root, [*git, "check-ignore", "--no-index", "-z", "--stdin"], empty, given)
    return {os.fsdecode(path.removeprefix(b"./")) for path in found.split(b"\0") if path}


def _run(root: Path, command: list[str], folder: str, given: bytes = b"") -> bytes:
    try:
        done = subprocess.run(command, cwd=folder, input=given, capture_output=True)
    except OSError:
        raise UsageError(f"{root / NAME} needs git, which is not installed", hint="install git, or --no-ship") from None
    if done.returncode > 1:  # 1: nothing is ignored
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"git cannot read {root / NAME}: {said[0] if said else 'no reason given'}")
    return done.stdout
