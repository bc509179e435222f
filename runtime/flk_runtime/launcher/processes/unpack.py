"""Put the user's code from the mounted ConfigMaps into the working folder of the ranks."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

from flk_runtime.contract import pod_layout
from flk_runtime.errors import SetupError


def unpack(source: Path, target: Path, expected: str) -> int:
    """Put the code in ``source`` into ``target`` and return the number of files. Raises SetupError.

    ``source`` contains a split archive, code.tar.gz.000, code.tar.gz.001, …, or the files themselves, as the Helm
    chart mounts them. ``expected`` is a SHA-256 in hex: of the whole archive, or of the output of ``sha256sum`` for the
    files in the order of their names. A container that was restarted may call it again with the same target.
    """
    pieces = sorted(source.glob(pod_layout.CODE_ARCHIVE + ".*"))
    if not pieces:
        return _copy(source, target, expected)
    archive = b"".join(piece.read_bytes() for piece in pieces)
    _compare(source, hashlib.sha256(archive).hexdigest(), expected)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        members = tar.getmembers()
        files = {member.name for member in members if member.isfile()}
        for member in members:
            linked = member.linkname and os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname))
            path = target / member.name
            outside = not path.resolve().is_relative_to(target.resolve())
            if member.islnk() or (linked and linked not in files) or outside:
                raise SetupError(f"the archive of the code has a link or a path outside its folder: {member.name}")
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, members, filter="data")
        else:  # Python before 3.10.12 and 3.11.4
            tar.extractall(target, members)  # noqa: S202 - checked above
    return len(members)


def _copy(source: Path, target: Path, expected: str) -> int:
    files = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    if not files:
        raise SetupError(f"neither {pod_layout.CODE_ARCHIVE}.* nor other files in {source}")
    sums = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    _compare(source, hashlib.sha256(sums.encode()).hexdigest(), expected)
    for name, data in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return len(files)


def _compare(source: Path, found: str, expected: str) -> None:
    if expected and found != expected:
        raise SetupError(f"the code in {source} has the hash {found[:12]}, but {expected[:12]} was submitted")
