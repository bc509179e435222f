"""Snapshots: the state of a training in one file, which is either whole or not there.

Rank 0 writes ``step-000000100.pt`` through a temporary file, and keeps the newest two. The files are torch.save's
(``torch.load(path)["objects"]["model"]`` gives the parameters), hold tensors and plain values only, and are read
without running any code out of them. Rank 0 also decides what is resumed from and sends it to the others, so the ranks
need not share a folder.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flk_runtime import contract
from flk_runtime.distributed import process_group as group
from flk_runtime.errors import CheckpointError

FORMAT = 1
KEPT = 2
LARGE = 1 << 12  # bytes from which a tensor is sent only when it is asked for
_NAME = re.compile(r"step-([0-9]{9,})\.pt")
_TEMPORARY = ".step-*.tmp"
_GLOBAL = re.compile(r"GLOBAL (\S+)")


class Folder:
    """The snapshots of one training. All methods are for rank 0 alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked = False  # whether a file of this process has been read back

    def prepare(self) -> None:
        """Make the folder if need be, and make sure that snapshots can be written: hours of training depend on it."""
        probe = self.path / f".step-probe-{os.getpid()}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(probe, "wb") as file:
                file.write(b"flk")
                os.fsync(file.fileno())
            for left in self.path.glob(_TEMPORARY):  # of a process that was killed while it wrote, and the probe
                left.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"the snapshot folder {self.path} can't be written to: {error.strerror or error}"
            ) from None

    def newest(self, report: Callable[[str], None]) -> tuple[Path, bytes] | None:
        """The newest file that can be read. Those that can't are reported and renamed to ``….unreadable``."""
        for path in reversed(self._files()):
            try:
                content = path.read_bytes()
            except OSError as error:  # of the storage, not of the file: going back to an older one would hide it
                raise CheckpointError(f"the snapshot {path} can't be read: {error.strerror or error}") from None
            try:
                decode(content)
            except CheckpointError as error:
                raise CheckpointError(f"the snapshot {path} {error}") from None
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                report(f"the snapshot {path} can't be read and is left out: {reason}")
                with contextlib.suppress(OSError):
                    path.rename(path.with_name(path.name + ".unreadable"))
                continue
            return path, content
        return None

    def write(self, content: Mapping[str, Any], steps: int) -> Path:
        """Write a snapshot and remove all but the newest two."""
        path = self.path / f"step-{steps:09d}.pt"
        temporary = self.path / f".{path.name}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                torch.save(dict(content), file)
                file.flush()
                os.fsync(file.fileno())
            if not self._checked:
                _check(temporary)
                self._checked = True
            os.replace(temporary, path)
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)  # the name is on disk as well
            finally:
                os.close(folder)
            for old in self._files()[:-KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"the snapshot {path} can't be written: {error.strerror or error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _files(self) -> list[Path]:
        """Oldest first, by step."""
        found = [(int(match[1]), path) for path in self.path.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found)]


def encode_header(*, steps: int, world_size: int) -> dict[str, Any]:
    """What every snapshot says of itself."""
    return {"format": FORMAT, "flk": contract.VERSION, "steps": steps, "world_size": world_size}


def decode(content: bytes) -> dict[str, Any]:
    """The snapshot in the bytes of a file, its tensors on the CPU. Any exception: not a whole snapshot."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        damaged = archive.testzip()  # torch itself does not compare the checksums
    if damaged is not None:
        raise ValueError(f"wrong checksum of {damaged}")
    data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(data, dict) or not {"format", "steps", "objects", "random"} <= data.keys():
        raise ValueError("it is no snapshot of flk's")
    if data["format"] > FORMAT:
        raise CheckpointError(f"was written by flk {data['flk']}, which this version ({contract.VERSION}) can't read")
    return data


def agree(folder: Folder, report: Callable[[str], None]) -> tuple[str, dict[str, Any]] | None:
    """Where the training goes on: the newest snapshot of rank 0, its path and content, on every rank. Collective."""
    found: list[tuple[Path, bytes]] = []

    def look() -> str | None:
        folder.prepare()
        newest = folder.newest(report)
        if newest:
            found.append(newest)
        return str(newest[0]) if newest else None

    path = group.on_main(look)
    if path is None:
        return None
    content = decode(found[0][1]) if found else None
    outline = io.BytesIO()
    if content:
        content["objects"] = _map(content["objects"], lambda tensor: Deferred(tensor) if _is_large(tensor) else tensor)
        torch.save({**content, "objects": _map(content["objects"], _outline)}, outline)
    received = torch.load(io.BytesIO(group.broadcast_bytes(outline.getvalue() if content else None)), weights_only=True)
    if content is None:
        content = received
        content["objects"] = _map(content["objects"], lambda tensor: Deferred(tensor) if tensor.is_meta else tensor)
    return path, content


class Deferred:
    """A large tensor of a snapshot, which rank 0 has and sends when all ranks `fetch` it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # on the meta device where this is not rank 0
        self.shape = tensor.shape

    def outline(self) -> torch.Tensor:
        return self._tensor.to("meta")

    def fetch(self) -> torch.Tensor:
        """The tensor, on the CPU. Collective."""
        return group.broadcast_tensor(self._tensor)


def _outline(value: Any) -> Any:
    return value.outline() if isinstance(value, Deferred) else value


def fetch(value: Any) -> Any:
    """``value``, with all tensors in it that rank 0 alone has. Collective."""
    return _map(value, lambda each: each.fetch() if isinstance(each, Deferred) else each)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` applied to each tensor, deferred or not, in its dictionaries, lists and tuples."""
    if isinstance(value, (torch.Tensor, Deferred)):
        return function(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # of its class, with the versions that torch keeps in a model's state
        mapped.update({key: _map(each, function) for key, each in value.items()})
        return mapped
    if isinstance(value, (list, tuple)):
        return type(value)(_map(each, function) for each in value)
    return value


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= LARGE


def mismatch(model: nn.Module, state: Mapping[str, Any]) -> str | None:
    """In what ``state`` is another model's than ``model``, in a few words; None where it fits."""
    own = model.state_dict()
    for name in own.keys() - state.keys():
        return f"it has no {name!r}, which the model has"
    for name in state.keys() - own.keys():
        return f"it has {name!r}, which the model has not"
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and state[name].shape != value.shape:
            return f"{name!r} has the shape {tuple(state[name].shape)} in it, and {tuple(value.shape)} in the model"
    return None


def _check(path: Path) -> None:
    """Make sure that a snapshot can be read back, while there is still somebody to tell."""
    try:
        decode(path.read_bytes())
    except Exception as error:
        name = _GLOBAL.search(str(error))
        what = f"a registered object's state_dict() holds a {name[1]}" if name else str(error).splitlines()[0]
        raise CheckpointError(
            f"a snapshot can't be read back: {what}; only tensors, numbers, strings, lists, tuples and dictionaries can"
        ) from error
