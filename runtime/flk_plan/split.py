"""Split: a model whose layers a plan of tensor parallelism splits, as one of the ranks computes it.

Its modules get parameters of the shapes that the rank holds, and hooks in the place of the collectives. So a trace of
the model has the shapes, the memory and the FLOPs of one rank. The splitting and its collectives are torch's
(torch/distributed/tensor/parallel/style.py), after Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn

from flk_plan.communication import CollectiveKind
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions

Communicate = Callable[[str, int], None]  # takes the kind of a collective, and the bytes of the whole tensor


@dataclass(frozen=True)
class _Split:
    """How a style splits a module, and what its computation waits for."""

    linear: int | None  # dimension of a linear layer's weight that is split
    embedding: int | None  # dimension of an embedding's
    forward: CollectiveKind | None = None  # collective on the output
    backward: CollectiveKind | None = None  # collective on the gradient of the input
    parts: bool = False  # the input is whole, and the module takes its part


_SPLITS: Final[Mapping[str, _Split]] = {
    "colwise": _Split(0, 1, backward=CollectiveKind.ALL_REDUCE),
    "colwise_gather_output": _Split(0, 1, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE),
    "colwise_rep": _Split(0, 1, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE),
    "embedding_colwise": _Split(0, 1, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE),
    "rowwise": _Split(1, None, CollectiveKind.ALL_REDUCE),
    "rowwise_split_input": _Split(1, 0, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, parts=True),
    "rowwise_rep": _Split(1, 0, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, parts=True),
    "embedding_rowwise": _Split(1, 0, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, parts=True),
}


class SplitModel:
    """How a plan splits a model over ``ranks`` ranks."""

    def __init__(self, model: nn.Module, options: ParallelOptions, ranks: int) -> None:
        """Raises SetupError for what the plan of the model, or of ``options``, has and flk plan does not model."""
        from flk_runtime.parallel.tensor_parallel import styles_of

        self.ranks = ranks
        self._modules: list[tuple[nn.Module, _Split]] = []
        self.shapes: dict[int, tuple[int, ...]] = {}  # of rank 0's part of each parameter, by its id
        self._parts: dict[tuple[int, str], tuple[int, ...]] = {}  # the same by module and name
        for path, style in styles_of(model, options.tp_plan).items():
            module = model.get_submodule(path)
            split = _SPLITS.get(style)
            if split is None:
                raise SetupError(f"plan does not model the style {style!r} that tensor parallelism has for {path!r}")
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                raise SetupError(f"plan does not model the split of {path!r}, a {type(module).__name__}")
            self._modules.append((module, split))
            self._add(path, module, split)

    def _add(self, path: str, module: nn.Module, split: _Split) -> None:
        dimension = split.linear if isinstance(module, nn.Linear) else split.embedding
        if dimension is None:
            raise SetupError(
                f"the plan of tensor parallelism has rowwise for the embedding {path!r}: expected embedding_rowwise"
            )
        for name, each in module._parameters.items():
            if each is None or (name == "bias" and dimension == 1):
                continue
            size = each.shape[dimension]
            if size % self.ranks:
                raise SetupError(f"tp={self.ranks} does not divide dimension {dimension} of {path}.{name}, {size}")
            part = (*each.shape[:dimension], size // self.ranks, *each.shape[dimension + 1 :])
            self.shapes[id(each)] = self._parts[id(module), name] = part

    @contextlib.contextmanager
    def applied(self, communicate: Communicate) -> Iterator[None]:
        """Inside, the model computes as one of the ranks does, and tells ``communicate`` its collectives."""
        with contextlib.ExitStack() as stack:
            for module, split in self._modules:
                for name, each in list(module._parameters.items()):
                    part = self._parts.get((id(module), name))
                    if each is not None and part is not None:
                        stack.callback(module._parameters.__setitem__, name, each)
                        module._parameters[name] = nn.Parameter(each.new_empty(part), each.requires_grad)
                before = functools.partial(self._before, split, communicate)
                after = functools.partial(self._after, split, communicate)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
            yield

    def _before(self, split: _Split, communicate: Communicate, module: nn.Module, args: Any) -> Any:
        given = args[0]
        if not given.is_floating_point():
            return args
        if split.backward is CollectiveKind.ALL_REDUCE:
            given = cast(Any, _Collective.apply)(
                given, None, functools.partial(_tell, communicate, CollectiveKind.ALL_REDUCE), 1
            )
        elif split.parts:
            tell = functools.partial(_tell, communicate, CollectiveKind.ALL_GATHER)
            given = cast(Any, _Part.apply)(given, tell, self.ranks)
        return (given, *args[1:])

    def _after(self, split: _Split, communicate: Communicate, module: nn.Module, args: Any, output: Any) -> Any:
        if split.forward is None:
            return output
        factor = self.ranks if split.forward is CollectiveKind.ALL_GATHER else 1
        return cast(Any, _Collective.apply)(output, functools.partial(_tell, communicate, split.forward), None, factor)


def _tell(communicate: Communicate, kind: CollectiveKind, whole: torch.Tensor) -> None:
    communicate(kind.value, whole.numel() * whole.element_size())


class _Collective(torch.autograd.Function):
    """A new tensor, of the last dimension times ``factor``, in the place of a collective's result."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, forward: Any, backward: Any, factor: int) -> torch.Tensor:
        ctx.backward_of, ctx.factor = backward, factor
        if forward is None:
            return given.view_as(given)
        result = given.new_empty((*given.shape[:-1], given.shape[-1] * factor))
        forward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0]
        if ctx.backward_of is not None:
            gradient = gradient.clone()  # as torch's functional collectives do
            ctx.backward_of(gradient)
        elif ctx.factor > 1:
            gradient = gradient[..., : gradient.shape[-1] // ctx.factor].contiguous()
        return gradient, None, None, None


class _Part(torch.autograd.Function):
    """A rank's part of the last dimension; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, tell: Any, ranks: int) -> torch.Tensor:
        ctx.tell, ctx.ranks = tell, ranks
        return given[..., : given.shape[-1] // ranks].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        part = gradients[0]
        whole = part.new_empty((*part.shape[:-1], part.shape[-1] * ctx.ranks))
        ctx.tell(whole)
        return whole, None, None
