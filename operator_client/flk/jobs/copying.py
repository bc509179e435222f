"""Copy a file or a folder between this machine and a container: an archive of tar through an exec.

The archive is unpacked beside its target, and gets the target's name once it is whole. Meanwhile it is also in a file
here: beside the target of what is received, and in $TMPDIR for what is sent. In the container, tar packs and unpacks.
Symbolic links are left out: they may lead anywhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from flk.errors import ApiError, FlkError, UsageError
from flk.kube.sockets import STDERR, RemoteCommand
from flk.observe.client import JobClient
from flk.observe.resources import EXEC
from flk_runtime.contract.values import dataclass

Note = Callable[[str], None]
_TAR: Final = "command -v tar >/dev/null 2>&1 || { echo 'the container has no tar' >&2; exit 127; }\n"
# Writes an archive of $1.
_READ: Final = (
    'p=$(readlink -f -- "$1") && [ -e "$p" ] || { echo "there is no $1" >&2; exit 1; }\n'
    + _TAR
    + 'd=${p%/*}; exec tar -cf - -C "${d:-/}" "./${p##*/}"\n'
)
# Prints the path that something named $2 gets: below $1, if that is a folder.
_PLACE: Final = (
    't=$1; if [ -d "$t" ]; then t=${t%/}/$2; else case $t in */) echo "there is no folder $t" >&2; exit 1;; esac; fi\n'
    'd=$(dirname -- "$t"); [ -d "$d" ] || { echo "there is no folder $d" >&2; exit 1; }\n'
    'if [ -d "$t" ] || { [ -e "$t" ] && [ "$3" = folder ]; }; then echo "$t exists already" >&2; exit 1; fi\n'
    'printf %s "$t"\n'
)
# Unpacks an archive from its input in the new folder $1. -o: the files belong to the user of the container.
_WRITE: Final = _TAR + 'mkdir -- "$1" && tar -xof - -C "$1" || { rm -rf -- "$1"; exit 1; }\n'
_REMOVE: Final = 'rm -rf -- "$1"\n'
# Gives $3 in that folder its name $2, and removes the folder.
_NAME: Final = 'mv -f -- "$1/$3" "$2"; code=$?; rm -rf -- "$1"; exit $code\n'


@dataclass(frozen=True)
class Container:
    """A container of a pod from which files are read, or to which they are written."""

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
                self._run(_READ, path, what=path, output=archive)
                archive.seek(0)
                inner = Path(folder, "unpacked")  # apart from the archive, whose name NFS shows
                inner.mkdir()
                os.replace(_unpacked(archive, inner, note), place)
        except OSError as error:
            raise UsageError(f"{place} cannot be written: {error.strerror}") from None
        return str(place)

    def write(self, source: Path, path: str, note: Note) -> str:
        """Copy a file or a folder of this machine to the container, all of it or nothing, and return where it is.

        Raises UsageError if the source cannot be read, ApiError if the path cannot be written or the connection breaks.
        """
        if not source.exists():
            raise UsageError(f"there is no {source} on this machine")
        source, printed = source.resolve(), io.BytesIO()
        kind = "folder" if source.is_dir() else "file"
        self._run(_PLACE, path, source.name, kind, what=path, output=printed)
        target = printed.getvalue().decode(errors="replace")
        temporary = posixpath.join(posixpath.dirname(target), f".flk-cp-{uuid.uuid4().hex[:8]}")
        with tempfile.TemporaryFile() as archive:
            _pack(source, archive, note)
            archive.seek(0)
            try:
                self._run(_WRITE, temporary, what=path, source=archive)
                self._run(_NAME, temporary, target, source.name, what=path)
            except BaseException:  # also Ctrl-C
                with contextlib.suppress(FlkError):
                    self._run(_REMOVE, temporary, what=path)
                raise
        return target

    def _run(
        self, script: str, *words: str, what: str, output: IO[bytes] | None = None, source: IO[bytes] | None = None
    ) -> None:
        """Run a script with ``source`` as its input, and write what it prints to ``output``. Raises ApiError."""
        where, command = self.client.target(EXEC, self.pod), ["sh", "-c", script, "sh", *words]
        remote = RemoteCommand(self.client.api.access, where, command, container=self.container)
        errors = bytearray()

        def write(channel: int, data: bytes) -> None:
            if channel == STDERR:
                errors.extend(data[: 4096 - len(errors)])
            elif output is not None:
                output.write(data)

        def send() -> None:
            with contextlib.suppress(Exception):  # the connection has ended, which the main thread reports
                while source is not None and (data := source.read(1 << 16)):
                    remote.send(data)
                remote.end_input()

        threading.Thread(target=send, daemon=True).start()
        try:
            code = remote.run(write)
        finally:
            remote.close()
        if code:
            said = errors.decode(errors="replace").strip().splitlines()
            reason = said[0] if said else f"the copying command ended with exit code {code}"
            raise ApiError(f"{self.pod}:{what}: {reason}; nothing of it is copied")


def _pack(source: Path, archive: IO[bytes], note: Note) -> None:
    """Write an archive of a file or a folder. Raises UsageError if it cannot be read."""

    def sent(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not _is_kept(member, note):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    try:
        with tarfile.open(fileobj=archive, mode="w|") as packed:
            packed.add(source, source.name, filter=sent)
    except OSError as error:
        hint = "the archive of what is sent is in a temporary file: TMPDIR names a folder with more room"
        raise UsageError(f"{source} cannot be packed: {error}", hint=hint) from None


def _unpacked(archive: IO[bytes], folder: Path, note: Note) -> Path:
    """Unpack the one file or folder that an archive has in a folder. Raises ApiError for what no tar sends."""
    if not hasattr(tarfile, "data_filter"):
        raise UsageError("flk cp JOB:PATH needs a Python of 3.10.12, 3.11.4 or later on this machine")

    def received(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        return tarfile.data_filter(member, path) if _is_kept(member, note) else None

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


def _is_kept(member: tarfile.TarInfo, note: Note) -> bool:
    """Return whether a member is copied, and say so if not."""
    kept = member.isdir() or member.islnk() or (member.isfile() and not member.issparse())
    if not kept:
        note(f"left out {posixpath.normpath(member.name)}: it is neither a file nor a folder")
    return kept
