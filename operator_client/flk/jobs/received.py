"""Unpack an archive that a pod sends, without trust: nothing is written elsewhere, and only whole copies are kept."""

from __future__ import annotations

import os
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from flk.errors import ApiError, FlkError, UsageError

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
            self._folder = Path(tempfile.mkdtemp(prefix=".flk-cp-", dir=self.path.parent))
        except OSError as error:
            raise UsageError(f"{self.path.parent} cannot be written: {error.strerror}") from None
        self._copy = self._folder / "copy"

    def unpack(self, stream: IO[bytes]) -> None:
        """Write what an archive holds: one file, or a folder as ``.``. Raises ApiError for what no tar sends.

        Raises UsageError if it cannot be written here.
        """
        links: list[tuple[str, str]] = []
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                first = True
                for member in archive:
                    name = _inside(member.name)
                    if first and not member.isdir() and name:
                        self._write(archive, member, "")
                    elif member.issym():
                        links.append((name, member.linkname))
                    else:
                        self._write(archive, member, name)
                    first = False
            for name, target in links:  # last: nothing is written through a link
                self._link(name, target)
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        path = self._copy / name if name else self._copy
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(member.mode & 0o777 | 0o700)
            return
        if member.islnk():
            first = self._copy / _inside(member.linkname)
            if not first.is_file() or first.is_symlink():
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
            self._note(f"left out {name or member.name}: it is neither a file nor a folder nor a link")
            return
        self.files, self.size = self.files + 1, self.size + member.size

    def _link(self, name: str, target: str) -> None:
        """Make a link to something in the same folder; leave out any other.

        The name tells how deep the link lies only if no part of it is a link.
        """
        path = self._copy / name
        if any(os.path.islink(above) for above in path.parents if above.is_relative_to(self._copy)):
            self._note(f"left out the link {name}: it lies below another link")
            return
        ups, rest = _ups(target)
        if not name or target.startswith("/") or ".." in rest or ups > name.count("/"):
            self._note(f"left out the link {name or self.path}: it leads out of the folder, to {target}")
            return
        os.symlink(target, path)

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


def _ups(target: str) -> tuple[int, list[str]]:
    """Return how many folders a link goes up at its beginning, and the parts after that."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return ups, parts[ups:]


def sent(path: Path, root: str, note: Callable[[str], None]) -> Iterator[tuple[Path, str]]:
    """Yield the files, folders and links at a path, each with its name in an archive whose root is ``root``.

    Raises UsageError if one cannot be read.
    """
    yield path, root
    if path.is_symlink() or not path.is_dir():
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
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield Path(entry.path), inner
        else:
            note(f"left out {entry.path}: it is neither a file nor a folder nor a link")
