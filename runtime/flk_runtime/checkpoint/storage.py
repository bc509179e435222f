"""The checkpoint folder: files that hold a whole checkpoint or do not exist.

A checkpoint is ``step-000000100.pt``, written to a temporary file, synced and renamed; the newest two are kept. The
file is torch.save's: ``torch.load(path)["objects"]["model"]`` is the model's state_dict. It holds tensors and plain
values only, and is read with ``weights_only=True``, so that reading runs no code of the file's.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flk_runtime import contract
from flk_runtime.errors import CheckpointError

FORMAT = 1
KEPT = 2  # number of checkpoints that stay in the folder
_NAME = re.compile(r"step-([0-9]{9,})\.pt")
_TEMPORARY = ".step-*.tmp"
_GLOBAL = re.compile(r"GLOBAL (\S+)")  # in torch's message: the class that weights_only=True refuses


class CheckpointFolder:
    """The checkpoint files of one training run. Only rank 0 calls the methods; they raise CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._verified = False  # whether a file of this process has been read back

    def prepare(self) -> None:
        """Create the folder if it is missing, write a probe file, and remove temporary files of killed processes."""
        probe = self.path / f".step-probe-{os.getpid()}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(probe, "wb") as file:
                file.write(b"flk")
                os.fsync(file.fileno())
            for temporary in self.path.glob(_TEMPORARY):  # the probe is one of them
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to the checkpoint folder {self.path}: {error.strerror or error}"
            ) from None

    def read_newest(self, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
        """The path and content of the newest checkpoint that is intact; None if there is none.

        A damaged file is renamed to ``….unreadable``, after a call of ``warn``.
        """
        for path in reversed(self._files()):
            try:
                data = path.read_bytes()
            except OSError as error:  # the storage failed: an older file would hide that
                raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
            try:
                return path, decode(data)
            except CheckpointError as error:
                raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from None
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warn(f"skipping the damaged checkpoint {path}, renamed to {path.name}.unreadable: {reason}")
                with contextlib.suppress(OSError):
                    path.rename(path.with_name(path.name + ".unreadable"))
        return None

    def write(self, content: Mapping[str, Any], steps: int) -> Path:
        """Write a checkpoint and remove all but the newest `KEPT`. The first file is read back to verify it."""
        path = self.path / f"step-{steps:09d}.pt"
        temporary = self.path / f".{path.name}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                torch.save(dict(content), file)
                file.flush()
                os.fsync(file.fileno())
            if not self._verified:
                _verify(temporary)
                self._verified = True
            os.replace(temporary, path)
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)  # makes the new name durable
            finally:
                os.close(folder)
            for old in self._files()[:-KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {path}: {error.strerror or error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _files(self) -> list[Path]:
        """Checkpoints, oldest first."""
        found = [(int(match[1]), path) for path in self.path.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found)]


def header(*, steps: int, world_size: int) -> dict[str, Any]:
    """The entries that describe a checkpoint itself."""
    return {"format": FORMAT, "flk": contract.VERSION, "steps": steps, "world_size": world_size}


def decode(data: bytes) -> dict[str, Any]:
    """The checkpoint in the bytes of a file, with tensors on the CPU.

    Raises CheckpointError for a newer format, and any other exception where ``data`` is not an intact checkpoint.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        damaged = archive.testzip()  # torch.load does not compare the checksums
    if damaged is not None:
        raise ValueError(f"wrong checksum of {damaged}")
    content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not {"format", "steps", "objects", "random"} <= content.keys():
        raise ValueError("the file is not a checkpoint of flk")
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"flk {content['flk']} wrote it in format {content['format']}, and flk {contract.VERSION} reads formats up "
            f"to {FORMAT}; install the newer flk"
        )
    return content


def _verify(path: Path) -> None:
    """Raise CheckpointError if a checkpoint that was just written cannot be read back."""
    try:
        decode(path.read_bytes())
    except Exception as error:
        name = _GLOBAL.search(str(error))
        reason = f"a registered object's state_dict() holds a {name[1]}" if name else str(error).splitlines()[0]
        raise CheckpointError(
            f"cannot read back a checkpoint that was just written: {reason}; a state_dict may hold tensors, numbers, "
            "strings, lists, tuples and dictionaries"
        ) from error
