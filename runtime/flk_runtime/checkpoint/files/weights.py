"""Weights: the tensors of a model in a file or folder, of which each rank reads the chunks that it needs."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path as FilePath
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from flk_runtime.checkpoint.files import safetensors
from flk_runtime.checkpoint.load import FilesReader, SavedCheckpoint, open_stored
from flk_runtime.checkpoint.shard import ChunkReader, merge_entries
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.checkpoint.storage import exists, find_newest, open_destination, open_section
from flk_runtime.checkpoint.storage.manifest import LATEST, MANIFEST, METADATA, STEP, check_regular
from flk_runtime.contract.pod_layout import is_address
from flk_runtime.errors import CheckpointError, MismatchError, checkpoint_error
from flk_runtime.shared.shard_file import Entry

_INDEX = "*.safetensors.index.json"  # of Hugging Face: which tensor is in which file of a folder
_KEYS = ("model_state_dict", "state_dict", "model", "module", "net")  # under which scripts save weights beside others
_COMPILED = "_orig_mod."  # of torch.compile, anywhere in a name


class Weights:
    """The weights at a path, as a module named ``model`` reads them: in the place of `SavedCheckpoint`.

    The path leads to a safetensors file, a file of torch.save, a folder of Hugging Face's or of
    torch.distributed.checkpoint, a checkpoint of flk, or the folder or address of flk's checkpoints, of which the last
    good one counts. Collective: the ranks share the comparison of flk's files with their checksums. Raises
    CheckpointError if the path leads to none of these, or to files that are damaged or name files elsewhere. Names are
    without the part of torch.compile.
    """

    def __init__(self, path: str) -> None:
        self.place = path
        self._checkpoint = _open(path)
        paths = list(self._checkpoint.names())
        tops = {each[0] for _, each in paths}
        names = (
            [(name, each[1]) for name, each in paths if len(each) == 2 and each[0] == "model"]  # no extra states
            # As torch's tutorial saves {"app": AppState(model, optimizer)}.
            or [(name, each[2]) for name, each in paths if len(tops) == 1 and len(each) == 3 and each[1] == "model"]
            or [(name, name) for name, _ in paths]
        )
        self._stored = {
            str(key).replace(_COMPILED, ""): name for name, key in names if self._checkpoint.shape(name) is not None
        }

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Read into the tensors of ``chunks``, whose paths are ``(object, name)``. Raises CheckpointError."""
        tied: dict[Any, list[Chunk]] = {}
        for chunk in chunks:
            place = chunk.tensor.data_ptr() or chunk.name
            tied.setdefault((place, chunk.shape, chunk.offsets), []).append(chunk)
        groups = [{str(chunk.path[1]): chunk for chunk in group} for group in tied.values()]
        self._leave_beginning_out(groups)
        names = [next(name for name in group if name in self._stored) for group in groups]
        self._checkpoint.read(
            [group[name]._replace(path=(self._stored[name],)) for name, group in zip(names, groups, strict=True)]
        )

    def _leave_beginning_out(self, groups: Sequence[Collection[str]]) -> None:
        """Leave out the beginning that all names have in common, if it takes that to have a model's names.

        They are in groups: a tied parameter has several names, and one of them is enough. Raises CheckpointError if
        there is no tensor of one of these names.
        """
        found = self._stored
        while missing := [group for group in groups if found.keys().isdisjoint(group)]:
            if len({name.partition(".")[0] for name in found}) != 1 or not all("." in name for name in found):
                some = ", ".join(map(repr, list(self._stored)[:3]))
                raise MismatchError(f"{self.place} holds no tensor {min(missing[0])!r}: its tensors are {some}, …")
            found = {name.partition(".")[2]: stored for name, stored in found.items()}
        self._stored = found


class _TensorsReader(ChunkReader):
    """Reads whole tensors, which are in memory or in mapped files."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read_metadata(self) -> Metadata:
        return merge_entries([[_entry(name, tensor) for name, tensor in self._tensors.items()]])

    def read_value(self, name: str) -> bytes:
        raise KeyError(name)

    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        return self._tensors[item.storage_index.fqn]


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return Entry(name, (name,), 0, 0, dtype, shape, (0,) * len(shape), shape)


def _open(path: str) -> SavedCheckpoint:
    """Open the weights at a path as a checkpoint. Raises CheckpointError."""
    try:
        return _open_checkpoint(path) or SavedCheckpoint(path, _TensorsReader(_read_files(FilePath(path))))
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
    folder, place, step = FilePath(path), path, None
    if not is_address(path):
        if (match := STEP.fullmatch(folder.name)) and exists(folder / MANIFEST):
            place, step = str(folder.parent), int(match[1])
        elif exists(folder / METADATA):
            return SavedCheckpoint(
                path, FilesReader(lambda file, begin, length: open_section(_below(folder, file), begin, length))
            )
        elif not exists(folder / LATEST):
            return None
    destination = open_destination(place)
    found = find_newest(destination, lambda text: print(f"flk: {text}", file=sys.stderr, flush=True), step)
    if found is None:
        raise MismatchError(f"{path} holds no whole checkpoint")
    return open_stored(destination, found)


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
    while isinstance(content, dict) and (inside := _weights_in(content)):
        content = inside
    if not isinstance(content, dict):
        raise MismatchError(f"{path} holds a {type(content).__name__}, and no state_dict of tensors")
    for key, value in content.items():
        if not isinstance(value, torch.Tensor):
            raise MismatchError(
                f"{path} holds no state_dict of tensors: {key!r} is a {type(value).__name__}; save the weights alone, "
                f"or under the key {_KEYS[0]!r}"
            )
    return content


def _weights_in(content: dict[str, Any]) -> dict[str, Any] | None:
    """The state_dict that a script has saved beside other values; None if ``content`` is one itself, or has none."""
    return next((content[key] for key in _KEYS if isinstance(content.get(key), dict)), None)
