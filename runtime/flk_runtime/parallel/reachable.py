"""tensors_in(): the tensors that an object holds, directly or through other objects."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``: in containers at any depth, in what functions have bound, and in objects' attributes.

    Not in modules, and not in attributes of objects that are reached through a function: these may be the whole script.
    """
    visited: set[int] = set()
    waiting = [(value, True)]
    while waiting:
        value, enters = waiting.pop()
        if id(value) in visited or isinstance(value, (type, nn.Module)):
            continue
        visited.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            waiting += [(each, enters) for each in (*value.keys(), *value.values())]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += [(each, enters) for each in value]
        elif callable(value):
            waiting += [(each, False) for each in _bound(value)]
        elif enters:
            waiting.append((getattr(value, "__dict__", None), enters))


def hidden_tensors(value: Any, seen: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in ``value`` from which a backward pass may come, but those that torch has ``seen``."""
    known = set(map(id, seen))
    return [each for each in tensors_in(value) if each.grad_fn is not None and id(each) not in known]


def _bound(function: Any) -> list[Any]:
    """The values that a function, method or partial has bound: arguments, defaults, variables around the function."""
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    inner = getattr(function, "__func__", function)
    cells = getattr(inner, "__closure__", None) or ()
    bound = [getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None)]
    for cell in cells:
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            bound.append(cell.cell_contents)
    return bound
