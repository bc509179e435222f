"""Copy files and folders between this machine and a container: an archive of tar through an exec.

The archive is in a file here, so that a copy takes its size twice for a moment: beside the target of what is received,
and in $TMPDIR for what is sent.

In the container, tar packs and unpacks. Links are left out: they may lead anywhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import shutil
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from flk.errors import ApiError, FlkError, UsageError
from flk.kube.sockets import STDERR, RemoteCommand
from flk.observe.client import JobClient
from flk.observe.resources import EXEC

Note = Callable[[str], None]
_TAR: Final = "command -v tar >/dev/null 2>&1 || { echo 'the container has no tar' >&2; exit 127; }\n"
# Writes an archive of $1: a folder as `.`, a file under any name.
_READ: Final = (
    'p=$(readlink -f -- "$1" 2>/dev/null) && [ -n "$p" ] || p=$1\n'
    '[ -e "$p" ] || { echo "there is no $1" >&2; exit 1; }\n'
    + _TAR
    + 'if [ -d "$p" ]; then exec tar -cf - -C "$p" .; fi\n'
    'd=${p%/*}; exec tar -cf - -C "${d:-/}" "./${p##*/}"\n'
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
_WRITE: Final = _TAR + 'exec tar -xof - -C "$1"\n'
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
        try:
            with tempfile.TemporaryFile(dir=received.folder) as archive:
                code, errors = self._run(_READ, path, output=archive)
                self._check(code, errors, path)
                archive.seek(0)
                received.unpack(archive)
        except OSError as error:
            raise UsageError(f"{received.path.parent} cannot be written: {error.strerror}") from None

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
        try:
            with tempfile.TemporaryFile() as file:
                with tarfile.open(fileobj=file, mode="w|", bufsize=1 << 16) as archive:
                    for local, name in members:
                        _add(archive, local, name, counted)
                file.seek(0)
                code, errors = self._run(_WRITE, folder, source=file)
        except OSError as error:
            problem = f"the archive of what is to be sent cannot be written here: {error.strerror}"
            raise UsageError(problem, hint="set TMPDIR to a folder with more room") from None
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
    """Add a file or a folder. Raises UsageError if it cannot be read as it was when it began."""
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
    except OSError as error:
        if error.filename is None and "unexpected end of data" not in str(error):
            raise  # of the archive
        reason = error.strerror or "it has become smaller"
        raise UsageError(f"{path} cannot be read: {reason}") from None


_CHUNK: Final = 1 << 20


class Received:
    """A copy of a file or a folder that is not yet in its place. It is beside its target, and is removed at the end."""

    def __init__(self, target: str, name: str, note: Callable[[str], None]) -> None:
        """``target`` is a folder that gets the copy under ``name``, or else its path. Raises UsageError."""
        self.files = self.size = 0
        self._note = note
        self.path = Path(target, name) if os.path.isdir(target) else Path(target)
        if target.endswith("/") and not os.path.isdir(target):
            raise UsageError(f"there is no folder {target} on this machine")
        if not self.path.parent.is_dir():
            raise UsageError(f"there is no folder {self.path.parent} on this machine")
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=".flk-cp-", dir=self.path.parent))
        except OSError as error:
            raise UsageError(f"{self.path.parent} cannot be written: {error.strerror}") from None
        self._copy = self.folder / "copy"

    def unpack(self, stream: IO[bytes]) -> None:
        """Write what an archive holds: one file, or a folder as ``.``. Raises ApiError for what no tar sends.

        Raises UsageError if it cannot be written here.
        """
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                first = True
                for member in archive:
                    name = _inside(member.name)
                    if first and not member.isdir() and name:
                        self._write(archive, member, "")
                    else:
                        self._write(archive, member, name)
                    first = False
            if not os.path.lexists(self._copy):
                raise ApiError("what the pod sends has neither a file nor a folder")
        except FlkError:
            raise
        except OSError as error:
            where = self.path if error.filename is None else self.path.parent
            raise UsageError(f"{where} cannot be written: {error.strerror or error}") from None
        except Exception as error:  # tarfile lets through whatever a hostile header makes of its numbers and names
            raise ApiError(f"what the pod sends is not a whole archive: {error or type(error).__name__}") from None

    def keep(self) -> None:
        """Put the copy into its place; a folder that is there gets its files, which replace files of the same names."""
        if not self._copy.is_dir():
            if self.path.is_dir():
                raise UsageError(f"{self.path} is a folder on this machine, and the source is a file")
            self._move(self._copy, self.path)
            return
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file on this machine, and the source is a folder")
        if not os.path.lexists(self.path):
            self._move(self._copy, self.path)
            return
        places = [(folder, self.path / os.path.relpath(folder, self._copy)) for folder, _, _ in os.walk(self._copy)]
        for _, place in places:
            _refuse_other_than_folder(place)
        for folder, place in places:
            try:
                place.mkdir(exist_ok=True)
            except OSError as error:
                raise UsageError(f"{place} cannot be written: {error.strerror}") from None
            for entry in os.scandir(folder):
                if not entry.is_dir(follow_symlinks=False):
                    self._move(Path(entry.path), place / entry.name)

    def close(self) -> None:
        """Remove what is not in its place."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        path = self._copy / name if name else self._copy
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(member.mode & 0o777 | 0o700)
            return
        if member.islnk():
            first = self._copy / _inside(member.linkname)
            if not first.is_file():
                raise ApiError(f"what the pod sends is not a whole archive: {member.linkname} is not in it")
            os.link(first, path)
        elif member.isfile() and not member.issparse():  # no end of zeros from a few bytes
            source = archive.extractfile(member)
            with open(path, "xb") as file:
                shutil.copyfileobj(source, file, _CHUNK)  # type: ignore[arg-type]
            if path.stat().st_size != member.size:
                raise ApiError(f"{name or member.name} has {path.stat().st_size} bytes, and the pod says {member.size}")
            path.chmod(member.mode & 0o777 | 0o600)
            os.utime(path, (member.mtime, member.mtime))
        else:
            self._note(f"left out {name or member.name}: it is neither a file nor a folder")
            return
        self.files, self.size = self.files + 1, self.size + member.size

    def _move(self, source: Path, target: Path) -> None:
        try:
            os.replace(source, target)
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from None


def _refuse_other_than_folder(place: Path) -> None:
    """Raise UsageError if something is at a folder's place, or a link to a folder: it may lead anywhere."""
    if os.path.islink(place):
        hint = f"name its target: {os.path.realpath(place)}"
        raise UsageError(f"{place} is a link on this machine, and nothing is written through links", hint=hint)
    if os.path.lexists(place) and not place.is_dir():
        raise UsageError(f"{place} is a file on this machine, and the source has a folder there")


def _inside(name: str) -> str:
    """Return the name of a member below the folder, empty for the folder. Raises ApiError if it is not below it."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ApiError(f"the pod sends a file named {name!r}, outside of what was asked for: nothing was kept")
    return "/".join(part for part in parts if part not in ("", "."))


def sent(path: Path, root: str, note: Callable[[str], None]) -> Iterator[tuple[Path, str]]:
    """Yield the files and folders at a path, each with its name in an archive whose root is ``root``.

    Raises UsageError if one cannot be read.
    """
    yield path, root
    if not path.is_dir():
        return
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    for entry in entries:
        inner = posixpath.join(root, entry.name)
        if entry.is_dir(follow_symlinks=False):
            yield from sent(Path(entry.path), inner, note)
        elif entry.is_file(follow_symlinks=False) and not os.access(entry.path, os.R_OK):
            raise UsageError(f"{entry.path} cannot be read: permission denied")
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path), inner
        else:
            note(f"left out {entry.path}: it is neither a file nor a folder")
