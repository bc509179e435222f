"""The pickled metadata of a checkpoint: enumerations of every version of Python are read, and no code runs."""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from flk_runtime.checkpoint.load import read_metadata
from flk_runtime.errors import MismatchError


class ByGetattr:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, owner: Any, name: str) -> None:
        self._arguments = owner, name

    def __reduce__(self) -> Any:
        return getattr, self._arguments


def test_members_of_enumerations_are_read_as_python_3_11_2_pickles_them() -> None:
    encoding = TensorProperties(dtype=torch.float32).__getstate__()[3]  # of the memory format
    content: Any = {"format": ByGetattr(type(encoding), encoding.name), "name": "a"}
    assert read_metadata(pickle.dumps(Metadata(content))).state_dict_metadata == {"format": None, "name": "a"}


def test_what_torch_writes_is_read() -> None:
    properties = TensorProperties(dtype=torch.bfloat16)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    index, place = MetadataIndex("a", torch.Size([0])), _StorageInfo("__0_0.distcp", 3, 5)
    content: Any = {"a": TensorStorageMetadata(properties, torch.Size([4]), [chunk])}
    found = read_metadata(pickle.dumps(Metadata(content, {"a": ("a",)}, {index: place})))
    tensor: Any = found.state_dict_metadata["a"]
    assert (tensor.properties.dtype, tensor.size, tensor.chunks[0].sizes) == (torch.bfloat16, (4,), (4,))
    assert (found.planner_data, found.storage_data[index].relative_path) == ({"a": ("a",)}, "__0_0.distcp")


def named(module: str, name: str, argument: str) -> bytes:
    """A pickle, written by hand, of what a function of a module returns for a text."""
    texts = [pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name, argument)]
    call = texts[2] + pickle.TUPLE1 + pickle.REDUCE
    return pickle.PROTO + b"\4" + texts[0] + texts[1] + pickle.STACK_GLOBAL + call + pickle.STOP


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
        ("pathlib", "os.mkdir"),
        ("builtins", "eval"),
    ],
)
def test_names_that_lead_to_other_modules_are_refused(tmp_path: Path, module: str, name: str) -> None:
    """pickle resolves dots in a name, so a module that imports another one leads to all that the other has."""
    with pytest.raises(MismatchError, match=f"it refers to {module}.{name}, which"):
        read_metadata(named(module, name, str(tmp_path / "made")))
    assert not (tmp_path / "made").exists()


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def reference(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


ENCODINGS = reference("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
LAYOUT = reference("torch.serialization", "_get_layout")
STATES = {
    "a dictionary": pickle.EMPTY_DICT + text("stolen") + text("x") + pickle.SETITEM,
    "slots": pickle.NONE + pickle.EMPTY_DICT + text("stolen") + text("x") + pickle.SETITEM + pickle.TUPLE2,
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "target",
    [
        reference("pathlib", "PosixPath"),
        reference("torch.distributed.checkpoint.metadata", "Metadata"),
        reference("torch.distributed.checkpoint.metadata", "TensorProperties"),
        reference("collections", "OrderedDict"),
        ENCODINGS,
        ENCODINGS + pickle.BININT1 + b"\0" + pickle.TUPLE1 + pickle.REDUCE,  # a member
        LAYOUT,
        reference("builtins", "getattr"),
        reference("torch", "float32"),
        LAYOUT + text("torch.strided") + pickle.TUPLE1 + pickle.REDUCE,
    ],
)
def test_attributes_of_classes_and_of_what_all_code_shares_are_not_set(target: bytes, state: str) -> None:
    """A pickle may set the attributes of whatever it names, by the opcode that sets the state of an instance."""
    owners = [PosixPath, Metadata, TensorProperties, OrderedDict, _MEM_FORMAT_ENCODING, *_MEM_FORMAT_ENCODING]
    shared = [*owners, _get_layout, getattr, torch.float32, torch.strided]
    data = pickle.PROTO + b"\4" + target + STATES[state] + pickle.BUILD + pickle.POP
    with contextlib.suppress(MismatchError):
        read_metadata(data + pickle.dumps(Metadata({}), 4)[2:])
    assert [each for each in shared if hasattr(each, "stolen")] == []
