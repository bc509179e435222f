"""SameNumbers: random numbers that do not depend on the number of ranks, so that dropout can be compared.

Ranks draw numbers for their samples, and one process draws them for the samples of all ranks. In a verification all
samples get the same ones instead: a draw has one row of numbers, for its last dimension, at each index of the others.
Each draw has the same row, since a stream may be read ahead. Draws from a generator of the script's own stay as they
are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from flk_runtime.system import rng
from flk_runtime.system.torch_private import dispatch_mode

_MANY: Final = 10_000  # draws of a step after which they differ, so that a loop ends that draws until a number fits
_ATEN: Final = torch.ops.aten
_LEAST: Final = 1e-12  # no logarithm of 0


class SameNumbers(dispatch_mode()):  # type: ignore[misc]
    """Gives equal random numbers to all samples, and notes what the passes compute with."""

    def __init__(self) -> None:
        super().__init__()
        self._draws = 0  # of this step
        self._others = False  # something was drawn that could not be made equal
        self._before = python_states()
        self.eps = 0.0
        """eps of the coarsest type among the results with several dimensions of this step."""

    def begin(self) -> None:
        """Take the states of the generators of Python and NumPy as those that have drawn nothing."""
        self._before = python_states()

    def begin_step(self) -> None:
        """Forget what was noted of the step before."""
        self._draws, self.eps = 0, 0.0

    @property
    def has_others(self) -> bool:
        """Whether numbers were drawn that are other ones in one process."""
        return self._others or python_states() != self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = func._schema.arguments
        given = {each.name: each.default_value for each in arguments if each.has_default_value()}
        given |= dict(zip([each.name for each in arguments], args, strict=False)) | (kwargs or {})
        result = func(*args, **(kwargs or {}))
        # Attention and cuDNN's LSTM draw for their dropout alone.
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None
        if is_draw and given.get("dropout_p", given.get("dropout", 1.0)):
            self._make_equal(func.overloadpacket, given, result)
        elif isinstance(result, torch.Tensor) and result.is_floating_point() and result.ndim > 1:
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result

    def _make_equal(self, function: Any, given: dict[str, Any], result: Any) -> None:
        """Overwrite ``result``, which ``function`` has drawn with the arguments ``given``."""
        self._draws += 1
        values = _VALUES.get(function)
        if function is _ATEN.native_dropout:
            p = 1 - (given["p"] if given["train"] is not False else 0.0)
            result[1].copy_(_bernoulli(self._row(result[1]), {"p": p}).expand_as(result[1]))
            result[0].copy_(given["input"] * result[1] / max(p, _LEAST))
        elif values and not isinstance(result, DTensor):
            result.copy_(values(self._row(result), given).expand(result.shape))
        else:
            self._others = True

    def _row(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers in [0, 1) for the last dimension of ``like``, or one for a tensor with one dimension or less."""
        generator = torch.Generator().manual_seed(self._draws if self._draws > _MANY else 0)
        numbers = torch.rand(like.shape[-1] if like.ndim > 1 else 1, generator=generator, dtype=torch.float64)
        return numbers.to(like.device)


def _uniform(row: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    low, high = float(given.get("from", 0.0)), float(given.get("to", 1.0))
    return row * (high - low) + low


def _normal(row: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    mean, std = (torch.as_tensor(given.get(name, default)) for name, default in (("mean", 0.0), ("std", 1.0)))
    normal: torch.Tensor = torch.special.ndtri(row.clamp(_LEAST, 1 - _LEAST))
    return normal * std + mean


def _bernoulli(row: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    # One number, or one for each element.
    return torch.where(row < torch.as_tensor(given.get("p", given.get("self"))), 1.0, 0.0)


def _integers(row: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    low, high = given.get("low", given.get("from")) or 0, given.get("high", given.get("to"))
    width = (1 << 24 if high is None else int(high)) - int(low)
    return (row * width).floor() + int(low)


def _order(row: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return torch.arange(given["n"], device=row.device)


_VALUES: Final[dict[Any, Any]] = {
    **dict.fromkeys((_ATEN.rand, _ATEN.rand_like, _ATEN.uniform_), _uniform),
    **dict.fromkeys((_ATEN.randn, _ATEN.randn_like, _ATEN.normal, _ATEN.normal_), _normal),
    **dict.fromkeys((_ATEN.bernoulli, _ATEN.bernoulli_), _bernoulli),
    **dict.fromkeys((_ATEN.randint, _ATEN.randint_like, _ATEN.random_), _integers),
    _ATEN.randperm: _order,
    _ATEN.multinomial: lambda row, given: given["self"].argmax(-1, keepdim=True),  # the most likely one
}


def python_states() -> list[Any]:
    """The states of the generators of Python and NumPy, whose draws cannot be made equal."""
    state = rng.get_state()
    return [state.get(name) for name in ("python", "numpy")]
