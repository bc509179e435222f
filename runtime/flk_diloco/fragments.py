"""Fragments: which parameters are exchanged together, and after which steps (Streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flk_runtime.checkpoint import user_name
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelModel


@dataclass(frozen=True)
class Fragment:
    """A part of the model: the names of its parameters, and their full shapes."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(shape.numel() for shape in self.shapes)


@dataclass(frozen=True)
class Schedule:
    """When fragments are sent and applied, in optimizer steps. Version v of a fragment is the result of its round v."""

    every: int  # steps between two rounds of a fragment
    delay: int  # steps between sending it and applying the result
    count: int  # number of fragments

    def due(self, fragment: int, version: int) -> int:
        """The step after which ``fragment`` is sent, for the round that makes ``version`` of it, from 1.

        The last fragment is sent after each multiple of ``every``, the others before it, evenly spaced.
        """
        return version * self.every - (self.count - 1 - fragment) * self.every // self.count

    def rounds_before(self, fragment: int, steps: int) -> int:
        """The number of rounds of ``fragment`` that are due after ``steps`` or before."""
        version = max(0, steps // self.every - 1)
        while self.due(fragment, version + 1) <= steps:
            version += 1
        return version

    def steps_at(self, versions: Sequence[int]) -> int:
        """The step of a worker that has just applied ``versions`` of the fragments."""
        return max(
            (self.due(number, version) + self.delay for number, version in enumerate(versions) if version), default=0
        )

    def since_round(self, versions: Sequence[int], steps: int) -> int:
        """The most of ``steps`` that came after the last round of a fragment, if ``versions`` were applied."""
        return steps - min(self.due(number, version) if version else 0 for number, version in enumerate(versions))


def split(parallel: ParallelModel, blocks: Sequence[nn.Module], count: int) -> list[Fragment]:
    """Deal the trained parameters out to at most ``count`` fragments of similar size.

    A block stays in one fragment, and neighbouring blocks go to different ones: the strided pattern of the paper's
    section 2.2. Parameters outside of blocks are dealt out one by one. Raises SetupError for a complex one.
    """
    parameters = parallel.trained()
    if other := next((name for name, each in parameters.items() if not each.is_floating_point()), ""):
        raise SetupError(
            f"{other!r} is complex, and the workers of strategy diloco exchange real parameters: keep its real and its "
            "imaginary part, and join them by torch.complex in forward"
        )
    inside: dict[str, int] = {}  # number of the block, by the name of a parameter
    number_of = {id(block): number for number, block in enumerate(blocks)}
    for path, module in parallel.model.named_modules():
        if id(module) in number_of:
            inside |= dict.fromkeys(
                (user_name(parallel.model, f"{path}.{name}") for name, _ in module.named_parameters()),
                number_of[id(module)],
            )
    units: dict[int | str, list[str]] = {}
    for name in parameters:
        units.setdefault(inside.get(name, name), []).append(name)
    sizes = [0] * min(count, len(units))
    names: list[list[str]] = [[] for _ in sizes]
    for unit in units.values():
        smallest = sizes.index(min(sizes))
        names[smallest] += unit
        sizes[smallest] += sum(parameters[name].numel() for name in unit)
    return [Fragment(tuple(part), tuple(parameters[name].shape for name in part)) for part in names]
