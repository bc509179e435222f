"""The user's code, from the ConfigMaps that brought it into the folder that the ranks start in."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from flk_runtime import contract


class CodeError(ValueError):
    """The archive is missing, or is not the one that was submitted."""


def unpack(source: Path, target: Path, expected: str) -> int:
    """Unpack the archive whose pieces lie in ``source`` into ``target`` and return the number of files.

    ``expected`` is the sha256 of the whole archive in hex. A second call over the same files changes nothing, so a
    container that is started anew may call it again.
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
            where = target / member.name
            if member.issym() or member.islnk() or not where.resolve().is_relative_to(target.resolve()):
                raise CodeError(f"the code has an entry that leaves its folder: {member.name}")
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, members, filter="data")
        else:  # Python before 3.10.12 and 3.11.4
            tar.extractall(target, members)  # noqa: S202 - checked above
    return sum(member.isfile() for member in members)
