"""SameNumbers: random numbers that do not depend on the number of ranks, so that dropout can be compared.

Ranks draw numbers for their samples, and one process draws them for the samples of all ranks. In a verification all
samples of a step get the same ones instead: a draw has one row of numbers, for its last dimension, at each index of the
others. The rows of a step are equal for equal draws, and other ones in the next step. Draws from a generator of the
script's own stay as they are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flk_runtime.system import rng

_MANY: Final = 10_000  # draws of a step after which they differ, so that a loop ends that draws until a number fits
_ATEN = torch.ops.aten
_PREVENTED: Final = 1e-12  # no logarithm of 0


class SameNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives equal random numbers to all samples, and notes what the passes compute with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = 0
        """The step whose numbers are drawn."""
        self.eps = 0.0
        """The largest distance between numbers of the types that matrix products gave in this step, relative to 1."""
        self.other: set[str] = set()
        """Names of functions whose draws could not be made equal."""
        self._draws = 0
        self._python = _python_states()

    def begin_step(self, step: int) -> None:
        """Draw other numbers, and forget what was noted of the step before."""
        self.step, self._draws, self.eps = step, 0, 0.0

    @property
    def has_other(self) -> bool:
        """Whether numbers were drawn that are others in one process."""
        return bool(self.other) or _python_states() != self._python

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            return self._made_equal(func, args, kwargs, result)
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.ndim > 1:
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result

    def _made_equal(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        packet = func.overloadpacket
        if packet in _WITHOUT_DRAW or any(isinstance(each, torch.Generator) for each in args):
            return result
        self._draws += 1
        if packet is _ATEN.native_dropout:
            return self._dropped(args[0], args[1], result) if args[2] is not False else result
        make = _MADE.get(packet)
        if make is None or isinstance(result, DTensor):
            self.other.add(str(func))
            return result
        make(result, self._row(result), _numbers(func, args, kwargs))
        return result

    def _dropped(self, given: torch.Tensor, p: float, result: Any) -> Any:
        mask = (self._row(given) >= p).expand_as(given)
        scale = 0.0 if p == 1 else 1 / (1 - p)
        result[0].copy_(given * mask * scale)
        result[1].copy_(mask)
        return result

    def _row(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers in [0, 1) for the last dimension of ``like``, or one for a tensor with one dimension or less."""
        salt = self._draws if self._draws > _MANY else 0
        generator = torch.Generator().manual_seed(self.step * 1_000_003 + salt)
        numbers = torch.rand(like.shape[-1] if like.ndim > 1 else 1, generator=generator, dtype=torch.float64)
        return numbers.to(like.device)


def _numbers(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**{each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}


def _uniform(result: torch.Tensor, row: torch.Tensor, given: dict[str, Any]) -> None:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    result.copy_((row * (high - low) + low).expand_as(result))


def _normal(result: torch.Tensor, row: torch.Tensor, given: dict[str, Any]) -> None:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    result.copy_(torch.special.ndtri(row.clamp(_PREVENTED, 1 - _PREVENTED)).expand(result.shape) * std + mean)


def _bernoulli(result: torch.Tensor, row: torch.Tensor, given: dict[str, Any]) -> None:
    p = given.get("p", given["self"])  # a number, or a tensor of one for each element
    result.copy_((row.expand(result.shape) < p).to(result.dtype))


def _integers(result: torch.Tensor, row: torch.Tensor, given: dict[str, Any]) -> None:
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    high = 1 << 24 if high is None else high
    result.copy_((row * (high - low) + low).floor().expand(result.shape))


def _exponential(result: torch.Tensor, row: torch.Tensor, given: dict[str, Any]) -> None:
    result.copy_(-(1 - row).log().expand(result.shape) / given.get("lambd", 1.0))


def _permutation(result: torch.Tensor, row: torch.Tensor, given: dict[str, Any]) -> None:
    result.copy_(torch.arange(result.numel(), device=result.device))


def _most_likely(result: torch.Tensor, row: torch.Tensor, given: dict[str, Any]) -> None:
    best = given["self"].topk(min(result.shape[-1], given["self"].shape[-1]), dim=-1).indices
    result.copy_(best if best.shape == result.shape else best[..., :1].expand(result.shape))


_MADE: Final = {
    _ATEN.rand: _uniform,
    _ATEN.rand_like: _uniform,
    _ATEN.uniform_: _uniform,
    _ATEN.randn: _normal,
    _ATEN.randn_like: _normal,
    _ATEN.normal_: _normal,
    _ATEN.normal: _normal,
    _ATEN.bernoulli: _bernoulli,
    _ATEN.bernoulli_: _bernoulli,
    _ATEN.randint: _integers,
    _ATEN.randint_like: _integers,
    _ATEN.random_: _integers,
    _ATEN.exponential_: _exponential,
    _ATEN.randperm: _permutation,
    _ATEN.multinomial: _most_likely,
}
# They are marked as random, and draw nothing without dropout, which the script's attention on a CPU never has.
_WITHOUT_DRAW: Final = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
    _ATEN.scaled_dot_product_attention,
}


def _python_states() -> tuple[Any, ...]:
    """The states of the generators of Python and NumPy, whose draws cannot be made equal."""
    state = rng.get_state()
    return tuple(state[name] for name in ("python", "numpy") if name in state)
