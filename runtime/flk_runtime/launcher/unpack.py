"""Unpack the user's code from the mounted ConfigMaps into the working folder of the ranks."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from flk_runtime import contract


class CodeError(ValueError):
    """The archive of the code is missing, unsafe, or not the one that was submitted."""


def unpack(source: Path, target: Path, expected: str) -> int:
    """Unpack the archive in ``source`` into ``target`` and return the number of files. Raises CodeError.

    ``source`` contains the archive in pieces: code.tar.gz.000, code.tar.gz.001, …. ``expected`` is the SHA-256 of the
    whole archive in hex. A container that was restarted may call it again with the same target.
    """
    pieces = sorted(source.glob(contract.CODE_ARCHIVE + ".*"))
    if not pieces:
        raise CodeError(f"no {contract.CODE_ARCHIVE}.* in {source}")
    archive = b"".join(piece.read_bytes() for piece in pieces)
    found = hashlib.sha256(archive).hexdigest()
    if expected and found != expected:
        raise CodeError(f"the code in {source} has the hash {found[:12]}, but {expected[:12]} was submitted")
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        members = tar.getmembers()
        for member in members:
            path = target / member.name
            if member.issym() or member.islnk() or not path.resolve().is_relative_to(target.resolve()):
                raise CodeError(f"the archive of the code has a link or a path outside its folder: {member.name}")
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, members, filter="data")
        else:  # Python before 3.10.12 and 3.11.4
            tar.extractall(target, members)  # noqa: S202 - checked above
    return sum(member.isfile() for member in members)
