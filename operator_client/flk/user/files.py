"""flk's folders in the user's home, and how a file is written there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def state_folder() -> Path:
    """Return the folder of flk's state files: ``$XDG_STATE_HOME/flk``, by default ``~/.local/state/flk``."""
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """Return the folder of flk's cache: ``$XDG_CACHE_HOME/flk``, by default ``~/.cache/flk``."""
    return _folder("XDG_CACHE_HOME", ".cache")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, which only the user may read, in place of an older one: all of it or nothing. Raises OSError.

    Its folders are made where they are missing, and only the user may enter these.
    """
    for folder in (*reversed(path.parent.parents), path.parent):
        folder.mkdir(mode=0o700, exist_ok=True)  # mkdir(parents=True) gives the mode to the last one only
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _folder(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # The XDG specification has programs ignore relative paths.
    return Path(given if given.startswith("/") else os.path.join(os.path.expanduser("~"), default), "flk")
