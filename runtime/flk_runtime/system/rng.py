"""Seeds and states of the global random generators of Python, NumPy and torch. Needs torch."""

from __future__ import annotations

import array
import contextlib
import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

# NumPy is taken from sys.modules: a script that has not imported it has no state of it.
_UINT32 = "I"  # of array.array
_SCRIPT_SEEDS = 1 << 32  # torch begins each process with 64 random bits; a script seeds with a smaller number


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from all of ``parts``, by SHA-256. Similar parts give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy (if it is imported) and torch, on the CPU and on all GPUs."""
    seed_cpu(seed)
    torch.manual_seed(seed)


def script_seed() -> int | None:
    """The seed in [0, 2**32) that the script has given torch's generator; None if it has given none.

    A larger or a negative one cannot be told from the random seed that torch begins with.
    """
    seed = torch.initial_seed()
    return seed if seed < _SCRIPT_SEEDS else None


def seed_of_next(seed: int) -> int:
    """The seed with which the training after the one with ``seed`` begins. `script_seed` tells it."""
    return derive_seed("after", seed) % _SCRIPT_SEEDS


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
    if numpy := sys.modules.get("numpy"):
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
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(bytes.fromhex(keys), numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(from_hex(state["cuda"]))


class OwnNumbers:
    """Random numbers apart from those of the rank: the global generators on the CPU have states of their own in `used`.

    For what has to draw the same on all ranks, and again after a restart, by Python's, NumPy's or torch's generator.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the generators go on where the last call ended, at first from the seed; then they are as before."""
        outside = _cpu_state()
        if self._state:
            _set_cpu_state(self._state)
        else:
            seed_cpu(self._seed)
        try:
            yield
        finally:
            self._state = _cpu_state()
            _set_cpu_state(outside)


def seed_cpu(seed: int) -> None:
    """Seed the global generators on the CPU. Unlike `seed_all`, it works in a worker of DataLoader too."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)


def _cpu_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None


def _set_cpu_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if state[2] and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state[2])


def to_hex(state: torch.Tensor) -> str:
    """The bytes of a generator's state as hexadecimal digits."""
    # Tensor.numpy() needs NumPy, and bytes() of a storage calls Python for each byte.
    return ctypes.string_at(state.data_ptr(), state.numel()).hex()


def from_hex(digits: str) -> torch.Tensor:
    """The state that `to_hex` was given."""
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
