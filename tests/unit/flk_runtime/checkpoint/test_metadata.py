"""The pickled metadata of a checkpoint: enumerations of every version of Python are read, and no code runs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from flk_runtime.checkpoint.load import read_metadata
from flk_runtime.errors import CheckpointError


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
    with pytest.raises(CheckpointError, match=r"is not the metadata of a checkpoint"):
        read_metadata(pickle.dumps(Metadata(content)))
