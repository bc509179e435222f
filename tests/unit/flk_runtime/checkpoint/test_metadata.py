"""The pickled metadata of a checkpoint: enumerations of every version of Python are read, and no code runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

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
    content: Any = {"format": ByGetattr(type(encoding), encoding.name)}
    found = read_metadata(pickle.dumps(Metadata(content)))
    assert found.state_dict_metadata == {"format": encoding}


def test_attributes_of_anything_else_are_not_read() -> None:
    content: Any = {"format": ByGetattr(Metadata, "__init__")}
    with pytest.raises(MismatchError, match=r"is not the metadata of a checkpoint"):
        read_metadata(pickle.dumps(Metadata(content)))


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
