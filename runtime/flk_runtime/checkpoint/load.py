"""Loading: reads the chunks of a checkpoint that this rank needs, by torch's rules for resharding."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from flk_runtime.checkpoint.shard import ChunkReader, narrow
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.checkpoint.storage.destination import Destination
from flk_runtime.checkpoint.storage.manifest import METADATA, Manifest
from flk_runtime.checkpoint.values import Path, decode, references
from flk_runtime.errors import MismatchError, RuntimeFailure, checkpoint_error, storage_access
from flk_runtime.shared.progress import Phase, own_page

Open = Callable[[str, int, int], BinaryIO]  # (file, begin, length) → a stream of the bytes


class SavedCheckpoint:
    """A checkpoint that can be read: which tensors and values it holds, and `read`, which reads chunks of them.

    ``place`` is its name in messages. Each rank reads on its own, except from the memory of the pods: then the
    constructor and all that reads are collective.
    """

    def __init__(self, place: str, reader: ChunkReader) -> None:
        self.place = place
        self._reader = reader
        with storage_access(f"read {place}"):
            self.metadata = reader.read_metadata()
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        paths = self.metadata.planner_data or {}
        self._paths: dict[str, Path] = {
            name: tuple(paths.get(name, (name,))) for name in self.metadata.state_dict_metadata
        }
        self.saved_tensors = {
            name: each
            for name, each in self.metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        for name, each in self.saved_tensors.items():
            if not (isinstance(each.properties, TensorProperties) and isinstance(each.size, torch.Size)):
                raise MismatchError(f"{place} does not tell dtype and shape of the tensor {name!r}")

    def names(self, prefix: Path = ()) -> Iterator[tuple[str, Path]]:
        """The names of tensors and values below a path, with their paths."""
        for name, path in self._paths.items():
            if path[: len(prefix)] == prefix:
                yield name, path

    def has(self, name: str) -> bool:
        return name in self._paths

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the full tensor of this name; None if there is none."""
        found = self.saved_tensors.get(name)
        return tuple(found.size) if found else None

    def empty(self, name: str) -> torch.Tensor:
        """A new tensor of the shape and dtype of a full tensor, on the CPU. Its values are not set."""
        found = self.saved_tensors[name]
        try:
            return torch.empty(found.size, dtype=found.properties.dtype)
        except (RuntimeError, TypeError, ValueError) as error:  # a size that no memory has
            raise MismatchError(f"{self.place} has no tensor {name!r} that can be read: {error}") from error

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self.saved_tensors[name].properties.dtype
        return dtype

    def read(self, chunks: Sequence[Chunk], values: Sequence[str] = ()) -> dict[str, Any]:
        """Read into the tensors of ``chunks``, and return the plain values of these names.

        Raises CheckpointError if the checkpoint has no such tensor, another shape, or cannot be read.
        """
        with own_page().during(Phase.RESTORING):
            self._reader.cover(chunks)
            planner = _ChunkPlanner(self, chunks, values)
            planner.set_up_planner({}, self.metadata)
            try:
                plan = self._reader.prepare_local_plan(planner.create_local_plan())
                self._reader.read_data(plan, planner).wait()
            except (RuntimeFailure, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever a damaged or a stranger's file can cause in torch
                raise checkpoint_error(f"cannot read {self.place}: {error or type(error).__name__}", error) from error
            return planner.values

    def value(self, name: str) -> Any:
        """A plain value."""
        return self.read((), [name])[name]

    def tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Full tensors, on the CPU."""
        found = {name: self.empty(name) for name in names}
        self.read([Chunk((name,), each, tuple(each.shape), (0,) * each.dim()) for name, each in found.items()])
        return found


class SavedObject:
    """The state of one object in a checkpoint: everything below its name."""

    def __init__(self, checkpoint: SavedCheckpoint, name: str, plain: Any) -> None:
        self.checkpoint = checkpoint
        self.name = name
        self.plain = plain  # encoded as by `flk_runtime.checkpoint.state.split_tensors`

    def entry_not_in(self, state: Container[Any]) -> str | None:
        """The first entry of a saved module that is not in ``state``, the keys of a module's state; None: all are."""
        for full, path in self.checkpoint.names((self.name,)):
            if len(path) == 2 and path[1] not in state:
                return full.removeprefix(self.name + ".")
        return None

    def is_of_model(self) -> bool:
        """Whether it is the state of a module, whose tensors stand at its top. Those of an optimizer do not."""
        tensors = self.checkpoint.saved_tensors
        return any(len(path) == 2 and name in tensors for name, path in self.checkpoint.names((self.name,)))

    def state_dict(self) -> Any:
        """The whole state, with full tensors on the CPU."""
        return decode(self.plain, self.checkpoint.tensors(list(references(self.plain))))


class _ChunkPlanner(LoadPlanner):
    """Plans to read some chunks, also where the checkpoint has cut the tensors into other chunks."""

    def __init__(self, saved: SavedCheckpoint, chunks: Sequence[Chunk], values: Sequence[str]) -> None:
        self._saved = saved
        self._chunks = {(chunk.name, torch.Size(chunk.offsets)): chunk for chunk in chunks}
        self._names = values
        self.values: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for (name, offsets), chunk in self._chunks.items():
            shape = self._saved.shape(name)
            if shape is None:
                raise MismatchError(f"{self._saved.place} holds no tensor {name!r}")
            if shape != chunk.shape:
                raise MismatchError(
                    f"{name!r} has the shape {shape} in {self._saved.place}, and the shape {chunk.shape} here"
                )
            chunks.setdefault(name, []).append(ChunkStorageMetadata(offsets, chunk.tensor.shape))
        for name, wanted in chunks.items():
            stored = self._saved.saved_tensors[name]
            # A chunk that is listed a million times is read once.
            listed = {(chunk.offsets, chunk.sizes): chunk for chunk in stored.chunks or ()}
            parts = create_read_items_for_chunk_list(name, replace(stored, chunks=[*listed.values()]), wanted)
            # It is more where two ranks of another program have written the same chunk.
            if sum(part.lengths.numel() for part in parts) < sum(chunk.sizes.numel() for chunk in wanted):
                raise MismatchError(f"{self._saved.place} does not hold all of the tensor {name!r}")
            items += parts
        for name in self._names:
            if not self._saved.has(name):
                raise MismatchError(f"{self._saved.place} holds no value {name!r}")
            index, none = MetadataIndex(name), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Reading runs no code of the file's.
        self.values[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        tensor = self._chunks[index.fqn, index.offset or torch.Size()].tensor
        return narrow(tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class FilesReader(ChunkReader):
    """Reads the files that `torch.distributed.checkpoint.FileSystemWriter` writes, and flk's, wherever they are.

    ``open_section(file, begin, length)`` opens a part of a file; a length of -1 means up to its end.
    """

    def __init__(self, open_section: Open, metadata: str = METADATA) -> None:
        """``metadata``: the name of the file with torch's Metadata."""
        self._open, self._metadata = open_section, metadata
        self._places: Any = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self._open(self._metadata, 0, -1) as stream:
            return read_metadata(stream.read())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def read_bytes(self, item: ReadItem) -> bytes:
        with self._section(item) as stream:
            return stream.read()

    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        with self._section(item) as stream:
            tensor: torch.Tensor = torch.load(stream, map_location="cpu", weights_only=True)
        return tensor

    def _section(self, item: ReadItem) -> BinaryIO:
        place = self._places[item.storage_index]
        return self._open(place.relative_path, place.offset, place.length)


def open_stored(destination: Destination, step: int, manifest: Manifest) -> SavedCheckpoint:
    """The checkpoint of a step that a destination holds."""
    files = FilesReader(partial(destination.open, step), manifest.metadata_file)
    return SavedCheckpoint(destination.locate(step), files)


_CLASSES = {
    ("pathlib", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
}
_FIXED = {("builtins", "set"), ("collections", "OrderedDict"), ("torch", "Size")}  # whose attributes cannot be set


class _Ignored:
    """Stands for what is called for layouts and memory formats of tensors, which nothing here reads.

    Python 3.11.0 to 3.11.3 pickle members of an enumeration as getattr(class, name).
    """

    __slots__ = ()

    def __call__(self, *arguments: Any) -> None:
        return None


_CALLED = {
    ("builtins", "getattr"): _Ignored(),
    ("torch.serialization", "_get_layout"): _Ignored(),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _Ignored(),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles torch's Metadata and nothing else, so that reading runs no code of the file's.

    pickle's opcode BUILD sets attributes of whatever a pickle names. So it gets classes that only it has.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        properties: Any = type("TensorProperties", (_Properties,), {})
        self._classes = {("torch.distributed.checkpoint.metadata", "TensorProperties"): properties}

    def find_class(self, module: str, name: str) -> Any:
        key = module, name  # exactly: pickle resolves dots in a name, through any module
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or key in _FIXED:
            return super().find_class(module, name)
        if key in _CALLED:
            return _CALLED[key]
        if key in _CLASSES and key not in self._classes:
            self._classes[key] = type(name, (super().find_class(module, name),), {})
        if key in self._classes:
            return self._classes[key]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which the metadata of a checkpoint does not")


class _Properties(TensorProperties):
    """The dtype of a tensor. Nothing here reads its other properties."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


def read_metadata(data: bytes) -> Metadata:
    """The Metadata that a file ``.metadata`` holds. Raises CheckpointError for anything else."""
    try:
        metadata = _MetadataUnpickler(data).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it is a {type(metadata).__name__}")
        # torch looks places up by its own class.
        places = {MetadataIndex(each.fqn, each.offset, each.index): place for each, place in _places(metadata)}
        return replace(metadata, storage_data=places)
    except Exception as error:
        raise MismatchError(f"{METADATA} is not the metadata of a checkpoint: {error}") from error


def _places(metadata: Metadata) -> Iterator[tuple[Any, Any]]:
    yield from (metadata.storage_data or {}).items()
