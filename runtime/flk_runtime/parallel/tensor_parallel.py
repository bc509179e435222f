"""Tensor parallelism by a plan: the styles of modules by their paths, as torch and Hugging Face name them."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from flk_runtime.errors import SetupError
from flk_runtime.parallel.options import Parallelizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _SummedGradient(ParallelStyle):
    """A module that is whole on all ranks, whose inputs are split: gradients of its parameters are added up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = dict[str, Any]()

        def before(module: nn.Module, _: Any) -> None:
            own.update(module._parameters)
            for name, each in own.items():
                if each is not None:
                    whole: Any = DTensor.from_local(each, device_mesh, [Replicate()], run_check=False)
                    module._parameters[name] = whole.to_local(grad_placements=[Partial()])

        def after(module: nn.Module, *_: Any) -> None:
            module._parameters.update(own)
            own.clear()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)
        return module


# The names are Hugging Face's. The splitting is Megatron-LM's (Shoeybi et al., arXiv 1909.08053, section 3).
_STYLES: Final[Mapping[str, Callable[[], ParallelStyle]]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": _SummedGradient,
}
_IGNORED: Final = ("replicate",)


def by_plan(model: nn.Module, given: Mapping[str, str] | None) -> Parallelizer:
    """The function that splits ``model`` by a plan; by default its own. Raises SetupError if the plan does not fit."""
    styles = {path: _STYLES[name]() for path, name in styles_of(model, given).items()}

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        parallelize_module(model, mesh, styles)

    return parallelize


def plan_of(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """The plan of a model: the given one, else its own; empty if it has none."""
    return dict(
        given if given is not None else getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    )


def styles_of(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """The names of the styles by the paths of the modules. Raises SetupError if the plan does not fit the model."""
    plan = plan_of(model, given)
    if not plan:
        raise SetupError(f"tp= needs a plan, and {type(model).__name__} has none: pass tp_plan= with styles by paths")
    uses = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    styles: dict[str, str] = {}
    for path, module in model.named_modules():
        pattern = next((each for each in plan if fnmatch.fnmatchcase(path, each)), None)
        if pattern is None or plan[pattern] in _IGNORED:
            continue
        if given is None and any(uses[id(each)] > 1 for each in module._parameters.values() if each is not None):
            continue  # a plan that a class brings is for its models without tied weights, too
        if plan[pattern] not in _STYLES:
            raise SetupError(
                f"the plan has the style {plan[pattern]!r} for {path!r}, which flk does not know: expected one of "
                f"{', '.join(_STYLES)}; for others use mesh= and parallelize="
            )
        styles[path] = plan[pattern]
    for pattern in plan:
        if given is not None and not any(fnmatch.fnmatchcase(path, pattern) for path, _ in model.named_modules()):
            raise SetupError(f"tp_plan= has {pattern!r}, and the model has no such module")
    return styles
