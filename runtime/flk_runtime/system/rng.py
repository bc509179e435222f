"""Seeds and states of the global random generators of Python, NumPy and torch. Needs torch."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


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


def get_state() -> dict[str, Any]:
    """The states of all global generators, as numbers, lists and uint8 tensors on the CPU.

    These types can be loaded with ``torch.load(weights_only=True)``. Of the GPUs only the current device is included.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if numpy := _numpy():
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_state(state: dict[str, Any]) -> None:
    """Restore the states that `get_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := _numpy()):
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _numpy() -> Any:
    # A script that has not imported NumPy has no state of it.
    return sys.modules.get("numpy")
