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

_DEPTH: Final = 6  # of attributes of attributes
_MANY: Final = 64  # a longer list has samples
_DATA: Final = ("data_source", "dataset")  # what a sampler draws from
_GENERATORS: Final = (random.Random, torch.Generator, numpy.random.Generator, numpy.random.RandomState)
_NOT_SEARCHED: Final = (nn.Module, ModuleType, type, torch.Tensor, numpy.ndarray, str, bytes, int, float)


def is_generator(thing: Any) -> bool:
    """Whether ``thing`` is a random generator of Python, NumPy or torch that has a state."""
    return isinstance(thing, _GENERATORS) and not isinstance(thing, random.SystemRandom)


def state_of(generator: Any) -> list[Any]:
    """The state of a generator as plain values, with its kind."""
    if isinstance(generator, torch.Generator):
        return ["torch", str(generator.device), rng.to_hex(generator.get_state())]
    if isinstance(generator, random.Random):
        return ["python", "", _listed(generator.getstate())]
    if isinstance(generator, numpy.random.Generator):
        state = generator.bit_generator.state
        return ["numpy", state["bit_generator"], _listed(state)]
    return ["numpy.RandomState", "", _listed(generator.get_state(legacy=False))]


def set_state(generator: Any, state: list[Any]) -> None:
    """Give a generator the state that `state_of` returned."""
    kind, _, value = state
    if kind == "torch":
        generator.set_state(rng.from_hex(value))
    elif kind == "python":
        generator.setstate(_unlisted(value))
    elif kind == "numpy":
        generator.bit_generator.state = _unlisted(value)
    else:
        generator.set_state(_unlisted(value))


def generators_of(things: Mapping[str, Any]) -> dict[str, Any]:
    """The generators that ``things`` hold in attributes, lists and dictionaries, by where they are."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [(name, thing, 0) for name, thing in things.items()]
    while waiting:
        path, thing, depth = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if is_generator(thing):
            found[path] = thing
        elif depth < _DEPTH and not isinstance(thing, _NOT_SEARCHED):
            waiting += [(f"{path}.{name}", held, depth + 1) for name, held in _held_by(thing)]
    return dict(sorted(found.items()))


def _held_by(thing: Any) -> list[tuple[Any, Any]]:
    if isinstance(thing, Mapping):
        return list(thing.items())[:_MANY]
    if isinstance(thing, (list, tuple)):
        return list(enumerate(thing)) if len(thing) <= _MANY else []
    return [(name, held) for name, held in getattr(thing, "__dict__", {}).items() if name not in _DATA]


def give(things: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give the generators of ``things`` these states, by where they are."""
    for path, generator in generators_of(things).items():
        if path in states:
            set_state(generator, states[path])


def _listed(value: Any) -> Any:
    """The state of a generator with arrays and tuples as lists that say what they were."""
    if isinstance(value, numpy.ndarray):
        return ["array", str(value.dtype), value.tobytes().hex()]
    if isinstance(value, tuple):
        if all(type(each) is int and 0 <= each < 1 << 32 for each in value):
            return ["words", "", numpy.asarray(value, numpy.uint32).tobytes().hex()]
        return ["tuple", "", [_listed(each) for each in value]]
    return {key: _listed(each) for key, each in value.items()} if isinstance(value, dict) else value


def _unlisted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unlisted(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    kind, dtype, content = value
    if kind == "array":
        return numpy.frombuffer(bytes.fromhex(content), dtype).copy()
    if kind == "words":
        return tuple(numpy.frombuffer(bytes.fromhex(content), numpy.uint32).tolist())
    return tuple(_unlisted(each) for each in content)
