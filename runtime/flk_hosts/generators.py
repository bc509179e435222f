"""The random generators that samplers hold, and their states by name."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import numpy
import torch
from torch import nn

from flk_runtime.system import rng

_DEPTH: Final = 4  # of attributes of attributes
_DATA: Final = ("data_source", "dataset")  # what a sampler draws from
_GENERATORS: Final = (random.Random, torch.Generator, numpy.random.Generator, numpy.random.RandomState)


def state_of(generator: Any) -> Any:
    """The state of a generator of Python, NumPy or torch as plain values."""
    if isinstance(generator, torch.Generator):
        return rng.to_hex(generator.get_state())
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, list(words), gauss]
    if isinstance(generator, numpy.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def set_state(generator: Any, state: Any) -> None:
    """Give a generator the state that `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(rng.from_hex(state))
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generators_of(things: Mapping[str, Any]) -> dict[str, Any]:
    """The generators that ``things`` hold in attributes, also those of attributes, by where they are."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [(name, thing, 0) for name, thing in things.items()]
    while waiting:
        path, thing, depth = waiting.pop()
        if isinstance(thing, _GENERATORS) and not isinstance(thing, random.SystemRandom):
            found[path] = thing
        elif depth < _DEPTH and id(thing) not in seen and not isinstance(thing, (nn.Module, ModuleType, type)):
            seen.add(id(thing))
            held = getattr(thing, "__dict__", {})
            waiting += [(f"{path}.{name}", held[name], depth + 1) for name in held if name not in _DATA]
    return dict(sorted(found.items()))


def give(things: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give the generators of ``things`` these states, by where they are."""
    for path, generator in generators_of(things).items():
        if path in states:
            set_state(generator, states[path])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.tolist() if isinstance(value, numpy.ndarray) else value
