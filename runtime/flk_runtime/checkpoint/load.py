"""Loading: reads the chunks of a checkpoint that this rank needs, by torch's rules for resharding."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from flk_runtime.checkpoint.shard import ChunkReader, narrow
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.checkpoint.storage import Destination
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
            metadata = reader.read_metadata()
        paths = metadata.planner_data or {}
        self._paths: dict[str, Path] = {name: tuple(paths.get(name, (name,))) for name in metadata.state_dict_metadata}
        self.saved_tensors = {
            name: each for name, each in metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)
        }
        for name, each in self.saved_tensors.items():
            if not (isinstance(each.properties, TensorProperties) and isinstance(each.size, torch.Size)):
                raise MismatchError(f"{place} does not tell dtype and shape of the tensor {name!r}")

    def names(self, prefix: Path = ()) -> Iterator[tuple[str, Path]]:
        """The names of tensors and values below a path, with their paths."""
        for name, path in self._paths.items():
            if path[: len(prefix)] == prefix:
                yield name, path

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the full tensor of this name; None if there is none."""
        found = self.saved_tensors.get(name)
        return tuple(found.size) if found else None

    def empty(self, name: str) -> torch.Tensor:
        """A new tensor of the shape and dtype of a full tensor, on the CPU. Its values are not set."""
        found = self.saved_tensors[name]
        try:
            return torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
        except (RuntimeError, TypeError, ValueError) as error:  # a size that no memory has
            raise MismatchError(f"{self.place} has no tensor {name!r} that can be read: {error}") from error

    def dtype(self, name: str) -> torch.dtype:
        return self.saved_tensors[name].properties.dtype

    def read(self, chunks: Sequence[Chunk], values: Sequence[str] = ()) -> dict[str, Any]:
        """Read into the tensors of ``chunks``, and return the plain values of these names.

        Raises CheckpointError if the checkpoint has no such tensor, another shape, or cannot be read.
        """
        tensors = {(chunk.name, torch.Size(chunk.offsets)): chunk.tensor for chunk in chunks}

        def target(item: ReadItem) -> torch.Tensor:
            index = item.dest_index
            return narrow(tensors[index.fqn, index.offset or torch.Size()], item.dest_offsets, item.lengths)

        with own_page().during(Phase.RESTORING):
            try:
                items, lacking = self._items(chunks)
                if self._reader.complete(lacks=bool(lacking)):
                    items, lacking = self._items(chunks)
                if lacking:
                    raise MismatchError(f"{self.place} does not hold all of the tensor {lacking!r}")
                self._reader.read(items, target)
                return {name: self._value(name) for name in values}
            except (RuntimeFailure, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever a damaged or a stranger's file can cause in torch
                raise checkpoint_error(f"cannot read {self.place}: {error or type(error).__name__}", error) from error

    def _items(self, chunks: Sequence[Chunk]) -> tuple[list[ReadItem], str]:
        """Return the items to read for ``chunks``, also where the checkpoint has cut the tensors into other chunks.

        With them comes the name of a tensor of which the metadata does not have all; empty: there is none.
        """
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for chunk in chunks:
            shape = self.shape(chunk.name)
            if shape is None:
                raise MismatchError(f"{self.place} holds no tensor {chunk.name!r}")
            if shape != chunk.shape:
                raise MismatchError(
                    f"{chunk.name!r} has the shape {shape} in {self.place}, and the shape {chunk.shape} here"
                )
            box = ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.shape)
            wanted.setdefault(chunk.name, []).append(box)
        items: list[ReadItem] = []
        lacking = ""
        for name, boxes in wanted.items():
            stored = self.saved_tensors[name]
            listed = {(chunk.offsets, chunk.sizes): chunk for chunk in stored.chunks or ()}  # once each
            parts = create_read_items_for_chunk_list(name, replace(stored, chunks=[*listed.values()]), boxes)
            # It is more where chunks of another program overlap.
            if sum(part.lengths.numel() for part in parts) < sum(box.sizes.numel() for box in boxes):
                lacking = lacking or name
            items += parts
        return items, lacking

    def _value(self, name: str) -> Any:
        """A plain value. Reading it runs no code of the file's."""
        if name not in self._paths:
            raise MismatchError(f"{self.place} holds no value {name!r}")
        return torch.load(io.BytesIO(self._reader.read_value(name)), map_location="cpu", weights_only=True)

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
        return any(
            len(path) == 2 and name in self.checkpoint.saved_tensors
            for name, path in self.checkpoint.names((self.name,))
        )

    def state_dict(self) -> Any:
        """The whole state, with full tensors on the CPU."""
        return decode(self.plain, self.checkpoint.tensors(list(references(self.plain))))


class FilesReader(ChunkReader):
    """Reads the files that `torch.distributed.checkpoint.FileSystemWriter` writes, and flk's, wherever they are.

    ``open_section(file, begin, length)`` opens a part of a file; a length of -1 means up to its end.
    """

    def __init__(self, open_section: Open, metadata: str = METADATA) -> None:
        """``metadata``: the name of the file with torch's Metadata."""
        self._open, self._metadata = open_section, metadata
        self._places: Any = {}

    def read_metadata(self) -> Metadata:
        with self._open(self._metadata, 0, -1) as stream:
            metadata = read_metadata(stream.read())
        self._places = metadata.storage_data
        return metadata

    def read_value(self, name: str) -> bytes:
        with self._section(MetadataIndex(name)) as stream:
            return stream.read()

    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        with self._section(item.storage_index) as stream:
            return cast("torch.Tensor", torch.load(stream, map_location="cpu", weights_only=True))

    def _section(self, index: MetadataIndex) -> BinaryIO:
        place = self._places[index]
        return self._open(place.relative_path, place.offset, place.length)


def open_stored(destination: Destination, manifest: Manifest) -> SavedCheckpoint:
    """The checkpoint with this manifest that a destination holds."""
    return SavedCheckpoint(
        destination.locate(manifest.step), FilesReader(partial(destination.open, manifest.step), manifest.metadata_file)
    )


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
        stored: dict[Any, Any] = metadata.storage_data or {}
        # torch looks places up by its own class.
        places = {MetadataIndex(each.fqn, each.offset, each.index): place for each, place in stored.items()}
        return replace(metadata, storage_data=places)
    except Exception as error:
        raise MismatchError(f"{METADATA} is not the metadata of a checkpoint: {error}") from error
