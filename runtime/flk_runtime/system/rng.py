"""Seeds and states of the global random generators of Python, NumPy and torch. Needs torch."""

from __future__ import annotations

import array
import ctypes
import hashlib
import random
import sys
from typing import Any

import torch

_UINT32 = "I"  # of array.array


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from all of ``parts``, by SHA-256. Similar parts give unrelated seeds."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy (if it is imported) and torch, on the CPU and on all GPUs."""
    random.seed(seed)
    if numpy := _numpy():
        numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def script_seed() -> int | None:
    """The seed in [0, 2**63) that the script has given torch's generator; None if it has given none."""
    seed = torch.initial_seed()
    return None if seed == torch.Generator().initial_seed() else seed % (1 << 63)


def get_state() -> dict[str, Any]:
    """The states of all global generators, as numbers, strings and lists of both.

    torch.save takes ten times as long for the thousands of numbers that the states consist of as for strings of
    hexadecimal digits. Of the GPUs only the current device is included.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, array.array(_UINT32, internal).tobytes().hex(), gauss],
        "torch": to_hex(torch.get_rng_state()),
    }
    if numpy := _numpy():
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [str(name), keys.tobytes().hex(), int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available():
        state["cuda"] = to_hex(torch.cuda.get_rng_state())
    return state


def set_state(state: dict[str, Any]) -> None:
    """Restore the states that `get_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(array.array(_UINT32, bytes.fromhex(internal))), gauss))
    torch.set_rng_state(from_hex(state["torch"]))
    if "numpy" in state and (numpy := _numpy()):
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(bytes.fromhex(keys), numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(from_hex(state["cuda"]))


def to_hex(state: torch.Tensor) -> str:
    """The bytes of a generator's state as hexadecimal digits."""
    # Tensor.numpy() needs NumPy, and bytes() of a storage calls Python for each byte.
    return ctypes.string_at(state.data_ptr(), state.numel()).hex()


def from_hex(digits: str) -> torch.Tensor:
    """The state that `to_hex` was given."""
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)


def _numpy() -> Any:
    # A script that has not imported NumPy has no state of it.
    return sys.modules.get("numpy")
