"""The safetensors format: 8 bytes with the length of a JSON header, the header, and raw tensors one after the other.

Read here since the package is not in every image.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Final

import torch

from flk_runtime.checkpoint.shard import view_tensor
from flk_runtime.checkpoint.storage.manifest import check_regular
from flk_runtime.errors import MismatchError

_LENGTH: Final = struct.Struct("<Q")
_NAMES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, as views of its pages. Raises CheckpointError if it is not whole."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        (length,) = _LENGTH.unpack(memory[: _LENGTH.size])
        header = json.loads(memory[_LENGTH.size : _LENGTH.size + length])
        begin = _LENGTH.size + length
        return {
            name: _tensor(memory, begin, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError:
        raise
    except Exception as error:  # whatever a wrong header can cause
        raise MismatchError(f"{path} is not a whole safetensors file: {error}") from error


def _tensor(memory: mmap.mmap, begin: int, code: str, shape: tuple[int, ...], first: int, end: int) -> torch.Tensor:
    """The tensor between two offsets after ``begin``. Raises ValueError if it does not fill them."""
    dtype = getattr(torch, _NAMES[code])
    if first < 0 or end - first != torch.Size(shape).numel() * dtype.itemsize or begin + end > len(memory):
        raise ValueError(f"a tensor of shape {shape} and type {code} is not between the offsets {first} and {end}")
    return view_tensor(memory, begin + first, _NAMES[code], shape)
