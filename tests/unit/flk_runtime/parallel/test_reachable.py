"""Tests of flk_runtime.parallel.reachable."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import nn

from flk_runtime.parallel.reachable import tensors_in


def test_tensors_are_found_in_containers_objects_and_functions_but_not_in_modules() -> None:
    one, two, three, four = (torch.full((), float(number)) for number in range(1, 5))
    whole = SimpleNamespace(first=[{"a": (one,)}], second=SimpleNamespace(inner={two: None}))
    whole.itself, whole.module, whole.function = whole, nn.Linear(1, 1), functools.partial(torch.add, three)
    whole.method = (lambda bound: lambda: bound)(four)
    assert sorted(each.item() for each in tensors_in(whole)) == [1, 2, 3, 4]
