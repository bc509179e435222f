"""The bundle that travels with a job: the user's files and flk's runtime, each packed into an archive.

Equal files make equal archives, so the hash of the code says whether two jobs ran the same code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from flk.errors import UsageError
from flk.manifest.files import parsed, select_files, unreadable
from flk.manifest.runtime import runtime_archive
from flk.spec.fields import IN_IMAGE
from flk.spec.job import Job
from flk_runtime.contract.quantities import size_text
from flk_runtime.contract.values import dataclass

SIZE_LIMIT: Final = 8 * 2**20  # bytes of the compressed code: about ten ConfigMaps
RAW_LIMIT: Final = 64 * 2**20  # bytes before compression: beyond it, compressing would take the user's time in vain
COUNT_LIMIT: Final = 20_000
_SHOWN: Final = 3  # files in a message


@dataclass(frozen=True)
class Bundle:
    """The archives that travel with a job. An empty bundle: the image contains the code and the runtime."""

    runtime: bytes | None = None  # an archive that Python can run
    code: bytes | None = None  # a tar.gz archive of the user's files
    files: tuple[str, ...] = ()  # the paths of these files, relative to the root
    script: str | None = None  # the path of the script, relative to the root; None for a module
    left_out: tuple[str, ...] = ()  # files that the user may expect and that do not travel, one sentence for each kind
    unread: str = ""  # what is wrong with the syntax of the script, as a sentence; empty if nothing is

    @property
    def size(self) -> int:
        """Bytes of both archives."""
        return len(self.runtime or b"") + len(self.code or b"")

    @property
    def archives(self) -> Mapping[str, bytes]:
        """The archives that travel, by their names."""
        return {name: data for name, data in (("runtime", self.runtime), ("code", self.code)) if data is not None}

    @property
    def sha256(self) -> str:
        """Hash of the archive of the code, in hex."""
        return hashlib.sha256(self.code or b"").hexdigest()


def make_bundle(job: Job, root: Path) -> Bundle:
    """Return the bundle of ``job``, whose files are below ``root``.

    Raises UsageError if the script is missing, a pattern matches nothing or the code is too large.
    """
    if job.ship in IN_IMAGE:
        return Bundle(runtime_archive() if job.ship else None)
    root = root.resolve()
    selection = select_files(job, root)
    contents = _read(root, selection.files)
    hidden = selection.script is None or zipfile.is_zipfile(root / selection.script)
    return Bundle(
        runtime=runtime_archive(),
        code=_packed(root, contents),
        files=selection.files,
        script=selection.script,
        left_out=selection.left_out,
        unread="" if hidden else _unread(contents, selection.script or ""),
    )


def _read(root: Path, files: Sequence[str]) -> dict[str, bytes]:
    """Return the contents of the files. Raises UsageError, before any is read, if they are too large."""
    try:
        sizes = {path: (root / path).stat().st_size for path in files}
        if len(files) > COUNT_LIMIT:
            raise _too_large(f"{len(files):,} files, the limit is {COUNT_LIMIT:,}", sizes)
        if sum(sizes.values()) > RAW_LIMIT:
            shown = f"{size_text(sum(sizes.values()))}, the limit is {size_text(SIZE_LIMIT)} compressed"
            raise _too_large(shown, sizes)
        return {path: (root / path).read_bytes() for path in files}
    except OSError as error:
        raise unreadable(error) from None


def _unread(contents: Mapping[str, bytes], script: str) -> str:
    """What is wrong with the syntax of the script, as a sentence. The Python of the pods may be newer, and read it."""
    try:
        parsed(contents[script])
    except (SyntaxError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        version = ".".join(map(str, sys.version_info[:2]))
        return f"Python {version} here cannot read {script}: {what}{where}; the ranks fail at once unless theirs can"
    except RecursionError:
        pass
    return ""


def _packed(root: Path, contents: Mapping[str, bytes]) -> bytes:
    """Return the archive. A link to a file that travels stays one: Python looks for modules beside its target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, data in contents.items():
            member = tarfile.TarInfo(path)
            target = os.path.relpath((root / path).resolve(), root) if os.path.islink(root / path) else path
            if target != path and target in contents:
                member.type, member.linkname = tarfile.SYMTYPE, os.path.relpath(target, os.path.dirname(path) or ".")
            else:
                member.size = len(data)
                member.mode = 0o755 if os.access(root / path, os.X_OK) else 0o644
            archive.addfile(member, io.BytesIO(data))
    code = gzip.compress(buffer.getvalue(), mtime=0)
    if len(code) > SIZE_LIMIT:
        sizes = {path: len(data) for path, data in contents.items()}
        raise _too_large(f"{size_text(len(code))} compressed, the limit is {size_text(SIZE_LIMIT)}", sizes)
    return code


def _too_large(size: str, sizes: dict[str, int]) -> UsageError:
    largest = sorted(sizes, key=lambda path: -sizes[path])[:_SHOWN]
    shown = ", ".join(f"{path} ({size_text(sizes[path])})" for path in largest)
    return UsageError(
        f"the code is too large to ship: {size}",
        hint=f"largest: {shown}; put data on a volume (--volume PVC:/PATH), run flk in a smaller folder, "
        "or put the code into the image (--no-ship)",
    )
