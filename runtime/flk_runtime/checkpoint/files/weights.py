"""Weights: the tensors of a model in a file or folder, of which each rank reads the chunks that it needs."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path as FilePath
from pathlib import PurePosixPath
from typing import Any

import torch

from flk_runtime.checkpoint.files import safetensors
from flk_runtime.checkpoint.load import FilesReader, SavedCheckpoint, open_stored
from flk_runtime.checkpoint.shard import narrow
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.checkpoint.storage import exists, find_newest, open_destination, open_section, problem_of
from flk_runtime.checkpoint.storage.manifest import LATEST, MANIFEST, METADATA, STEP, Manifest, check_regular
from flk_runtime.contract.pod_layout import is_address
from flk_runtime.errors import CheckpointError, MismatchError, checkpoint_error

_INDEX = "*.safetensors.index.json"  # of Hugging Face: which tensor is in which file of a folder
_KEYS = ("model_state_dict", "state_dict", "model", "module", "net")  # under which scripts save weights beside others
_COMPILED = "_orig_mod."  # of torch.compile, anywhere in a name


class Weights:
    """The weights at a path, under the names of the model.

    The path leads to a safetensors file, a file of torch.save, a folder of Hugging Face's or of
    torch.distributed.checkpoint, a checkpoint of flk, or the folder or address of flk's checkpoints, of which the last
    good one counts. Collective: the ranks share the comparison of flk's files with their checksums. Raises
    CheckpointError if the path leads to none of these, or to files that are damaged or name files elsewhere. Names are
    without the part of torch.compile.
    """

    def __init__(self, path: str) -> None:
        self.place = path
        self._prefix = ""
        self._checkpoint, self._tensors = _open(path)
        if self._checkpoint and any(each[0] == "model" for _, each in self._checkpoint.names()):
            self._prefix = "model."
        self._stored = {name.replace(_COMPILED, ""): name for name in self._stored_names()}

    def names(self) -> Iterator[str]:
        """The names of the tensors."""
        yield from self._stored

    def _stored_names(self) -> Iterator[str]:
        if self._checkpoint is None:
            yield from self._tensors
            return
        for name, path in self._checkpoint.names():
            is_entry = len(path) == 2 or not self._prefix  # not a tensor in a module's extra state
            if is_entry and name.startswith(self._prefix) and self._checkpoint.shape(name) is not None:
                yield name.removeprefix(self._prefix)

    def for_model(self, names: Iterable[Collection[str]]) -> None:
        """Leave out the beginning that all names have in common, if it takes that to have a model's ``names``.

        They are sets: a tied parameter has several names, and one of them is enough. Raises CheckpointError if there is
        no tensor of one of these names.
        """
        names, found = list(names), self._stored
        while missing := [each for each in names if found.keys().isdisjoint(each)]:
            if len({name.partition(".")[0] for name in found}) != 1 or not all("." in name for name in found):
                some = ", ".join(map(repr, list(self._stored)[:3]))
                raise MismatchError(f"{self.place} holds no tensor {min(missing[0])!r}: its tensors are {some}, …")
            found = {name.partition(".")[2]: stored for name, stored in found.items()}
        self._stored = found

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if there is none of this name."""
        return self.kind(name)[1] if name in self._stored else None

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and the shape of a tensor."""
        name = self._stored[name]
        if self._checkpoint is None:
            return self._tensors[name].dtype, tuple(self._tensors[name].shape)
        full = self._prefix + name
        return self._checkpoint.dtype(full), self._checkpoint.shape(full) or ()

    def tensor(self, name: str) -> torch.Tensor:
        """A full tensor, on the CPU."""
        name = self._stored[name]
        if self._checkpoint is None:
            return self._tensors[name]
        full = self._prefix + name
        return self._checkpoint.tensors([full])[full]

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Read into the tensors of ``chunks``, whose paths are ``(object, name)``. Raises CheckpointError."""
        if self._checkpoint is not None:
            stored = [(self._prefix + self._stored[str(chunk.path[1])],) for chunk in chunks]
            self._checkpoint.read([chunk._replace(path=path) for chunk, path in zip(chunks, stored, strict=True)])
            return
        for chunk in chunks:
            full, name = self.tensor(str(chunk.path[1])), str(chunk.path[1])
            if tuple(full.shape) != chunk.shape:
                raise MismatchError(
                    f"{name!r} has the shape {tuple(full.shape)} in {self.place}, and {chunk.shape} here"
                )
            chunk.tensor.copy_(narrow(full, chunk.offsets, chunk.tensor.shape))


class SavedWeights:
    """Weights as a module reads them from a checkpoint: in the place of `SavedCheckpoint`."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self.place = weights, weights.place

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._weights.shape(name.partition(".")[2])

    def empty(self, name: str) -> torch.Tensor:
        dtype, shape = self._weights.kind(name.partition(".")[2])
        return torch.empty(shape, dtype=dtype)

    def read(self, chunks: Sequence[Chunk], values: Sequence[str] = ()) -> dict[str, Any]:
        tied: dict[Any, list[Chunk]] = {}
        for chunk in chunks:
            place = chunk.tensor.data_ptr() or chunk.name
            tied.setdefault((place, chunk.shape, chunk.offsets), []).append(chunk)
        self._weights.for_model([{str(each.path[1]) for each in group} for group in tied.values()])
        groups = ([each for each in group if self.shape(each.name) is not None] for group in tied.values())
        self._weights.read([group[0] for group in groups])
        return {}


def _open(path: str) -> tuple[SavedCheckpoint | None, dict[str, torch.Tensor]]:
    """The checkpoint at a path, or the tensors in its files. Raises CheckpointError."""
    try:
        checkpoint = _open_checkpoint(path)
        return checkpoint, {} if checkpoint else _read_files(FilePath(path))
    except CheckpointError:
        raise
    except Exception as error:  # whatever a stranger's file can cause in the libraries that read it
        why = str(getattr(error, "strerror", None) or error or type(error).__name__).partition("\n")[0]
        message = f"cannot read weights from {path}: {why}"
        if isinstance(error, FileNotFoundError):  # the caller names it, so it will not appear
            raise MismatchError(message) from error
        raise checkpoint_error(message, error) from error


def _open_checkpoint(path: str) -> SavedCheckpoint | None:
    """The checkpoint at a path; None if it is a file, or a folder of other files."""
    folder = FilePath(path)
    if not is_address(path) and STEP.fullmatch(folder.name) and exists(folder / MANIFEST):
        manifest = Manifest.from_json((folder / MANIFEST).read_bytes())
        destination = open_destination(str(folder.parent))
        if problem := problem_of(destination, manifest):
            raise MismatchError(f"{path} is damaged: {problem}")
        return open_stored(destination, manifest.step, manifest)
    if not is_address(path) and exists(folder / METADATA):
        return SavedCheckpoint(
            path, FilesReader(lambda file, begin, length: open_section(_below(folder, file), begin, length))
        )
    if not is_address(path) and not exists(folder / LATEST):
        return None
    destination = open_destination(path)
    found = find_newest(destination, lambda text: print(f"flk: {text}", file=sys.stderr, flush=True), sets_aside=False)
    if found is None:
        raise MismatchError(f"{path} holds no whole checkpoint")
    return open_stored(destination, found.step, found.manifest)


def _below(folder: FilePath, file: str) -> FilePath:
    """The path of a file that another file of a folder names. Raises CheckpointError if the name leads elsewhere.

    A link in the folder may: Hugging Face's cache consists of them.
    """
    name = PurePosixPath(file)
    if name.is_absolute() or ".." in name.parts:
        raise MismatchError(f"{folder} names a file outside of it, {file!r}, which is not read")
    return folder / name


def _read_files(path: FilePath) -> dict[str, torch.Tensor]:
    if stat.S_ISDIR(path.stat().st_mode):
        files = sorted(path.glob("*.safetensors"))
        for index in path.glob(_INDEX):
            check_regular(index)
            files = sorted({_below(path, name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        if not files:
            raise MismatchError(f"{path} holds neither a checkpoint nor safetensors files")
        return {name: tensor for file in files for name, tensor in safetensors.read(file).items()}
    if path.suffix == ".safetensors":
        return safetensors.read(path)
    check_regular(path)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    while isinstance(content, dict) and (inside := _weights_in(path, content)):
        content = inside
    if not isinstance(content, dict):
        raise MismatchError(f"{path} holds a {type(content).__name__}, and no state_dict of tensors")
    for key, value in content.items():
        if not isinstance(value, torch.Tensor):
            raise MismatchError(f"{path} holds no state_dict of tensors: {key!r} is a {type(value).__name__}")
    return content


def _weights_in(path: FilePath, content: dict[str, Any]) -> dict[str, Any] | None:
    """The state_dict that a file has beside other values; None if ``content`` is one itself, or has none."""
    inside = {key: value for key, value in content.items() if isinstance(value, dict)}
    if known := [key for key in _KEYS if key in inside]:
        return inside[known[0]]
    found = [
        key for key, each in inside.items() if each and all(isinstance(one, torch.Tensor) for one in each.values())
    ]
    if len(found) > 1:
        names = ", ".join(map(repr, found))
        raise MismatchError(f"{path} holds several state_dicts, {names}: save the one to load as {_KEYS[0]!r}")
    return inside[found[0]] if found else None
