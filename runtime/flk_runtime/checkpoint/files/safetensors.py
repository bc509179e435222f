"""The safetensors format: 8 bytes with the length of a JSON header, the header, and raw tensors one after the other.

Written here since the package holds all tensors in memory to write a file, and is not in every image.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from flk_runtime.checkpoint.shard import view_tensor
from flk_runtime.checkpoint.storage.manifest import check_regular
from flk_runtime.errors import MismatchError

_LENGTH: Final = struct.Struct("<Q")
_DTYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_NAMES: Final = {code: name for name, code in _DTYPES.items()}


def write(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors on the CPU, one at a time, in the order of ``shapes``. Raises CheckpointError for other dtypes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in shapes.items():
        code = _DTYPES.get(str(dtype).removeprefix("torch."))
        if code is None:
            raise MismatchError(f"{name!r} has the dtype {dtype}, which the safetensors format does not have")
        end = position + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for _, tensor in tensors:
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


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
