"""LocalArchive: the files in the user's state folder, one for each job, bounded in number and size.

The folder is ``$XDG_STATE_HOME/flk/jobs``, by default ``~/.local/state/flk/jobs``. Below it, a folder for each API
server and namespace holds a compressed JSON file for each job. Only the user may read them.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Final

from flk.observe.archive.format import from_json, to_json
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.user_files import state_folder, write_whole

PLACE: Final = "on this machine"
MAX_FILES: Final = 500  # jobs that are kept
MAX_BYTES: Final = 200 << 20  # of all files together
MAX_AGE: Final = 60 * 86_400  # seconds since a file was written
MAX_READ: Final = 256 << 20  # bytes of one file after decompression: a larger one is not flk's
_SUFFIX: Final = ".json.gz"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


class LocalArchive:
    """The archive on this machine for the jobs of one namespace of a cluster."""

    def __init__(self, client: JobClient) -> None:
        self.root = state_folder() / "jobs"  # of all jobs
        server = hashlib.sha256(client.api.access.server.encode()).hexdigest()[:12]
        self.folder = self.root / server / _safe(client.namespace)

    def find(self, name: str, uid: str | None = None) -> Observation | None:
        """Return the archived observation of the job with that UID, or of the newest of that name; None without one.

        A damaged file counts as none.
        """
        try:
            paths = [self._path(name, uid)] if uid else sorted(self.folder.glob(self._path(name).name), key=_modified)
        except OSError:
            return None
        for path in reversed(paths):
            try:
                with gzip.open(path) as file:
                    return replace(from_json(file.read(MAX_READ)), place=PLACE)
            except (OSError, ValueError, EOFError, zlib.error):
                continue
        return None

    def write(self, seen: Observation) -> None:
        """Archive the observation of a job in place of an earlier one. Raises OSError."""
        write_whole(self._path(seen.name, seen.uid), gzip.compress(to_json(seen).encode(), 6, mtime=0))

    def _path(self, name: str, uid: str = "") -> Path:
        """Return the path of the file of a job, or without a UID the pattern of the files of all jobs of the name."""
        return self.folder / f"{_safe(name)}@{_safe(uid) if uid else '*'}{_SUFFIX}"

    def prune(self, *, files: int = MAX_FILES, size: int = MAX_BYTES, age: float = MAX_AGE) -> None:
        """Delete the oldest files of all clusters beyond these bounds. Raises OSError."""
        now, count, total = time.time(), 0, 0
        for path in sorted(self.root.glob(f"*/*/*{_SUFFIX}"), key=_modified, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                count, total = count + 1, total + path.stat().st_size
                if count > files or total > size or now - _modified(path) > age:
                    path.unlink()
        for path in self.root.glob("*/*/.*.new"):  # of a flk that was killed
            if now - _modified(path) > 3600:
                path.unlink(missing_ok=True)


def _safe(text: str) -> str:
    """Return text as part of a file name. Names of the API are safe; a server may answer anything."""
    return _UNSAFE.sub("_", text)[:200].lstrip(".") or "_"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
