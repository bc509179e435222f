"""Copy files and folders between this machine and a container: an archive of tar through an exec.

The archive is in a temporary file here, so that a copy takes its size twice for a moment.

In the container, tar packs and unpacks, or Python where the image has no tar.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import shlex
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from flk.errors import ApiError, FlkError, UsageError
from flk.jobs.received import Received, sent
from flk.kube.sockets import STDERR, RemoteCommand
from flk.observe.client import JobClient
from flk.observe.resources import EXEC

Note = Callable[[str], None]
_PYTHON: Final = (
    "elif command -v python3 >/dev/null 2>&1; then exec python3 -c {0}\n"
    "elif command -v python >/dev/null 2>&1; then exec python -c {0}\n"
    "else echo 'the container has neither tar nor python' >&2; exit 127\nfi\n"
)
_PACK: Final = "import sys,tarfile;t=tarfile.open(fileobj=sys.stdout.buffer,mode='w|');t.add(sys.argv[1],arcname='.')"
_UNPACK: Final = (
    "import sys,tarfile;t=tarfile.open(fileobj=sys.stdin.buffer,mode='r|');"
    "f=getattr(tarfile,'fully_trusted_filter',None);t.extractall(sys.argv[1],**({'filter':f} if f else {}))"
)
# Writes an archive of $1: a folder as `.`, a file under any name.
_READ: Final = (
    'p=$(readlink -f -- "$1" 2>/dev/null) && [ -n "$p" ] || p=$1\n'
    '[ -e "$p" ] || { echo "there is no $1" >&2; exit 1; }\n'
    "if command -v tar >/dev/null 2>&1; then\n"
    '  if [ -d "$p" ]; then exec tar -cf - -C "$p" .; fi\n'
    '  d=${p%/*}; exec tar -cf - -C "${d:-/}" "./${p##*/}"\n'
    + _PYTHON.format(f'{shlex.quote(_PACK + ";t.close()")} "$p"')
)
# Prints the path that something named $2 gets: below $1, if that is a folder.
_PLACE: Final = (
    't=$1; [ ! -d "$t" ] || t=${t%/}/$2\n'
    'case $1 in */) [ -d "$1" ] || { echo "there is no folder $1" >&2; exit 1; };; esac\n'
    'd=$(dirname -- "$t"); [ -d "$d" ] || { echo "there is no folder $d" >&2; exit 1; }\n'
    'if [ "$3" = file ] && [ -d "$t" ]; then echo "$t is a folder, and the source is a file" >&2; exit 1; fi\n'
    'if [ "$3" = folder ]; then\n'
    '  if [ -e "$t" ] && [ ! -d "$t" ]; then echo "$t is a file, and the source is a folder" >&2; exit 1; fi\n'
    '  mkdir -p -- "$t" || exit 1\n'
    "fi\n"
    'printf %s "$t"\n'
)
# Unpacks an archive from its input in the folder $1. -o: the files belong to the user of the container.
_WRITE: Final = 'if command -v tar >/dev/null 2>&1; then exec tar -xof - -C "$1"\n' + _PYTHON.format(
    f'{shlex.quote(_UNPACK)} "$1"'
)
# Gives the file $1 its name $2, if it has $3 bytes.
_NAME: Final = (
    'n=$(wc -c < "$1") && [ $((n)) -eq "$3" ] || { echo "$2 has $n of $3 bytes" >&2; rm -f -- "$1"; exit 1; }\n'
    'mv -f -- "$1" "$2"\n'
)


@dataclass(frozen=True)
class Copied:
    """What was copied: number of files, their bytes, and the path of the copy."""

    files: int
    size: int
    path: str


@dataclass(frozen=True)
class Container:
    """A container of a pod from which files are read, or to which they are written."""

    client: JobClient
    pod: str
    container: str

    def read(self, path: str, target: str, note: Note) -> Copied:
        """Copy a file or a folder of the container to this machine: all of it or nothing.

        Raises UsageError if ``target`` cannot be written, ApiError if the path cannot be read or the connection breaks.
        """
        name = posixpath.basename(posixpath.normpath(path))
        received = Received(target, name if name not in ("", ".", "..") else self.pod, note)
        try:
            self._receive(path, received)
            received.keep()
        finally:
            received.close()
        return Copied(received.files, received.size, str(received.path))

    def _receive(self, path: str, received: Received) -> None:
        with tempfile.TemporaryFile() as archive:
            try:
                code, errors = self._run(_READ, path, output=archive)
            except OSError as error:
                raise UsageError(f"{tempfile.gettempdir()} cannot be written: {error.strerror}") from None
            self._check(code, errors, path)
            archive.seek(0)
            received.unpack(archive)

    def write(self, source: Path, path: str, note: Note) -> Copied:
        """Copy a file or a folder of this machine to the container. A file is there whole or not at all.

        Raises UsageError if the source cannot be read, ApiError if the path cannot be written or the connection breaks.
        """
        if not source.exists():
            raise UsageError(f"there is no {source} on this machine")
        source = Path(os.path.realpath(source)) if source.is_symlink() else source
        if source.is_file() and not os.access(source, os.R_OK):
            raise UsageError(f"{source} cannot be read: permission denied")
        kind = "folder" if source.is_dir() else "file"
        temporary = f".flk-cp-{uuid.uuid4().hex[:8]}"
        members = list(sent(source, "." if kind == "folder" else temporary, note))
        members = members[kind == "folder" :]  # the folder itself may belong to another user there
        target = self._text(_PLACE, path, source.resolve().name, kind, what=path)
        folder = target if kind == "folder" else posixpath.dirname(target) or "."
        copied = self._send(members, folder, path, target)
        if kind == "file":
            self._text(_NAME, posixpath.join(folder, temporary), target, str(copied.size), what=path)
        return copied

    def _send(self, members: list[tuple[Path, str]], folder: str, path: str, target: str) -> Copied:
        counted = [0, 0]
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w|", bufsize=1 << 16) as archive:
                for local, name in members:
                    _add(archive, local, name, counted)
            file.seek(0)
            code, errors = self._run(_WRITE, folder, source=file)
        self._check(code, errors, path)
        return Copied(counted[0], counted[1], target)

    def _text(self, script: str, *words: str, what: str) -> str:
        """Run a short script without input, and return its output."""
        output = io.BytesIO()
        code, errors = self._run(script, *words, output=output, timeout=60)
        self._check(code, errors, what)
        return output.getvalue().decode(errors="replace")

    def _run(
        self,
        script: str,
        *words: str,
        output: IO[bytes] | None = None,
        source: IO[bytes] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, bytes]:
        """Run a script with ``source`` as its input, write what it prints to ``output``.

        Return its exit code, and the beginning of its errors.
        """
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
            return remote.run(write, timeout=timeout), bytes(errors)
        finally:
            remote.close()

    def _check(self, code: int, errors: bytes, what: str) -> None:
        if code:
            said = errors.decode(errors="replace").strip().splitlines()
            reason = said[0] if said else f"the copying command ended with exit code {code}"
            raise ApiError(f"{self.pod}:{what}: {reason}; nothing of it counts as copied")


def _add(archive: tarfile.TarFile, path: Path, name: str, counted: list[int]) -> None:
    """Add a file, a folder or a link. Raises UsageError if it cannot be read as it was when it began."""
    try:
        info = archive.gettarinfo(path, name)
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        if info.islnk():
            info.type, info.size = tarfile.REGTYPE, path.stat().st_size  # its first name may be elsewhere
        if info.isreg():
            with open(path, "rb") as file:
                archive.addfile(info, file)
            counted[0], counted[1] = counted[0] + 1, counted[1] + info.size
        else:
            archive.addfile(info)
    except FlkError:
        raise
    except OSError as error:
        if error.filename is None and "unexpected end of data" not in str(error):
            raise  # of the connection
        reason = error.strerror or "it has become smaller"
        raise UsageError(f"{path} cannot be read: {reason}") from None
