"""Copy a file or a folder from a container to this machine: an archive of tar through an exec.

The archive is in a file beside its target. It is unpacked there, and gets the target's name once it is whole. Symbolic
links are left out: they may lead anywhere.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from flk.errors import ApiError, UsageError
from flk.kube.sockets import STDERR, RemoteCommand
from flk.observe.client import JobClient
from flk.observe.resources import EXEC
from flk_runtime.contract.values import dataclass

Note = Callable[[str], None]
# Writes an archive of $1.
_READ: Final = (
    'case $1 in /*) w=;; *) w=" in $PWD";; esac; export LC_ALL=C\n'
    'p=$(readlink -f -- "$1") && [ -e "$p" ] || { echo "there is no $1$w" >&2; exit 1; }\n'
    "command -v tar >/dev/null 2>&1 || { echo 'the container has no tar' >&2; exit 127; }\n"
    'd=${p%/*}; exec tar -cf - -C "${d:-/}" "./${p##*/}"\n'
)
_MOST_SAID: Final = 65_536  # bytes of what tar says
# What GNU's tar says of files that a running job writes or removes meanwhile, with exit code 1, and of sockets. What it
# has read is in the archive.
_HARMLESS: Final = (": file changed as we read it", ": File removed before we read it", ": socket ignored")


@dataclass(frozen=True)
class Container:
    """A container of a pod from which files are read."""

    client: JobClient
    pod: str
    container: str

    def read(self, path: str, target: str, note: Note) -> str:
        """Copy a file or a folder of the container to this machine, all of it or nothing, and return where it is.

        Raises UsageError if ``target`` cannot be written, ApiError if the path cannot be read or the connection breaks.
        """
        name = posixpath.basename(posixpath.normpath(path))
        name = self.pod if name in ("", ".", "..") else name
        place = Path(target, name) if os.path.isdir(target) else Path(target)
        if place.is_dir():
            raise UsageError(f"{place} exists already on this machine", hint="remove it, or name another target")
        if target.endswith("/") and place == Path(target):
            raise UsageError(f"there is no folder {target} on this machine", hint=f"make it: mkdir -p {target}")
        try:
            with (
                tempfile.TemporaryDirectory(prefix=".flk-cp-", dir=place.parent) as folder,
                tempfile.TemporaryFile(dir=folder) as archive,
            ):
                self._pack(path, archive, note)
                archive.seek(0)
                inner = Path(folder, "unpacked")  # apart from the archive, whose name NFS shows
                inner.mkdir()
                os.replace(_unpacked(archive, inner, note), place)
        except OSError as error:
            raise UsageError(f"{place} cannot be written: {error.strerror}") from None
        return str(place)

    def _pack(self, path: str, output: IO[bytes], note: Note) -> None:
        """Write an archive of a file or a folder of the container to ``output``. Raises ApiError."""
        where, errors = self.client.target(EXEC, self.pod), bytearray()

        def write(channel: int, data: bytes) -> None:
            if channel == STDERR:
                errors.extend(data[: _MOST_SAID - len(errors)])
            else:
                output.write(data)

        with contextlib.closing(
            RemoteCommand(
                self.client.api.access,
                where,
                ["sh", "-c", _READ, "sh", path],
                container=self.container,
                stdin=False,
            )
        ) as remote:
            code = remote.run(write)
        # The last line is cut off where there were too many.
        said = errors.decode(errors="replace").strip().splitlines()[: None if len(errors) < _MOST_SAID else -1]
        grave = [line for line in said if not line.endswith(_HARMLESS)]
        if code > 1 or (code == 1 and (grave or not said)):
            reason = grave[0] if grave else f"the copying command ended with exit code {code}"
            raise ApiError(f"{self.pod}:{path}: {reason}; nothing of it is copied")
        if said:
            note(f"copying {path}: {said[0]}" + f" ({len(said) - 1} more)" * (len(said) > 1))


def _unpacked(archive: IO[bytes], folder: Path, note: Note) -> Path:
    """Unpack the one file or folder that an archive has in a folder. Raises ApiError for what no tar sends."""
    if not hasattr(tarfile, "data_filter"):
        raise UsageError("flk cp JOB:PATH needs a Python of 3.10.12, 3.11.4 or later on this machine")

    def received(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        if member.isdir() or member.islnk() or (member.isfile() and not member.issparse()):
            return tarfile.data_filter(member, path)
        note(f"left out {posixpath.normpath(member.name)}: it is neither a file nor a folder")
        return None

    try:
        with tarfile.open(fileobj=archive, mode="r|") as packed:
            packed.extractall(folder, filter=received)  # noqa: S202 - data_filter is asked
    except OSError:
        raise
    except Exception as error:  # tarfile lets through whatever a hostile header makes of its numbers and names
        reason = str(error) or type(error).__name__
        raise ApiError(f"what the pod sends is not a whole archive of files and folders: {reason}") from None
    copies = list(folder.iterdir())
    if len(copies) != 1:
        raise ApiError("what the pod sends is neither a file nor a folder")
    return copies[0]
