"""Optimizers of a parallelized model: those made before get its parameters, those made later a state by names."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flk_runtime.checkpoint import (
    DistributedStateful,
    OptimizerState,
    load_as_saved,
    names_by_id,
    optimizer_state,
    parameters_of,
    trained_modules,
)
from flk_runtime.distributed import parameters_in
from flk_runtime.errors import SetupError
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.system import pytree

_MARK: Final = "_flk_replaced"  # attribute of a replaced parameter: its name in the model


def rebind_optimizers(
    optimizers: Sequence[Optimizer], model: nn.Module, parallelize: Callable[[], ParallelModel], *, strict: bool
) -> ParallelModel:
    """Call ``parallelize``, which may replace parameters of ``model``, and give them to ``optimizers``. Collective.

    Meanwhile the optimizers hold no parameters, so that nothing keeps full parameters alive that have been sharded.
    Their groups keep their order and hyperparameters, and state that they have is sharded as the parameters are. Any
    other optimizer that holds a parameter that was replaced is refused at its step: nothing computes a gradient of it,
    so that the optimizer would train nothing, without a word.

    Raises SetupError if ``strict`` and an optimizer holds parameters that are not the model's (before ``parallelize``
    is called), if one keeps parameters outside of its groups, or if its state has a form of its own.
    """
    # Module.to() cannot move a parameter of another class, such as a quantized one, to which there is a weak reference.
    before = {
        name: weakref.ref(parameter)
        for name, parameter in parameters_of(model).items()
        if nn.Parameter in type(parameter).__mro__
    }
    names = [_parameter_names(optimizer, model, strict=strict) for optimizer in optimizers]
    states = [optimizer.state_dict() if optimizer.state else None for optimizer in optimizers]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = []  # the same list, which some optimizers keep beside their groups, as LBFGS does
        optimizer.state.clear()
    parallel = parallelize()
    parameters = parallel.parameters()
    for name, reference in before.items():
        if (old := reference()) is not None and old is not parameters.get(name):
            _mark(old, name)
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["params"][:] = [parameters[entry] if isinstance(entry, str) else entry for entry in own]
        _check_attributes(optimizer)
        parallel.attach(optimizer)
    for optimizer, state in zip(optimizers, states, strict=True):
        if state is not None:
            _shard(optimizer, parallel, state)
    return parallel


def adopt_optimizer(
    name: str, optimizer: Optimizer, models: Mapping[str, ParallelModel], *, shards: bool
) -> DistributedStateful | None:
    """The state of ``optimizer`` by the parameters of the ``models`` that it trains, which are attached to it.

    None if it trains other parameters too. Raises SetupError then if the strategy ``shards``, since
    rank 0 has the state of its own shards only, and for an optimizer of parameters that `parallelize` has replaced.
    """
    _refuse_replaced(optimizer)
    trained, missing = trained_modules(optimizer, {key: model.module for key, model in models.items()})
    if trained and missing and shards:
        raise SetupError(
            f"{name!r} is an optimizer of {len(parameters_in(optimizer))} parameters, and {missing} of them are in "
            "no parallelized model: make an optimizer of their own for these, or put all trained parameters into one "
            "module"
        )
    if missing or not trained:
        return None
    for key in trained:
        models[key].attach(optimizer)
    return optimizer_state(name, optimizer, trained)


def _shard(optimizer: Optimizer, parallel: ParallelModel, state: dict[str, Any]) -> None:
    """Load ``state``, which is of full tensors, as `torch.optim.Optimizer.load_state_dict` takes it."""
    if "state" not in state:
        raise SetupError(
            f"cannot shard the state of {type(optimizer).__name__}, whose state_dict() has no 'state': use the "
            "optimizer inside of it, or another one"
        )
    parameters = list(OptimizerState(optimizer, {"model": parallel.module}).names())

    def sharded(value: Any, parameter: nn.Parameter) -> Any:
        """A value as it is for this rank: its share, if it has the shape of the parameter."""
        is_full = isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
        return parallel.local_shard(parameter, value) if is_full else value

    entries = dict(state["state"])
    for index, values in state["state"].items():
        if isinstance(index, int):  # an entry that belongs to no parameter has a key of the optimizer's own
            entries[index] = {key: sharded(value, parameters[index]) for key, value in values.items()}
    load_as_saved(optimizer, {**state, "state": entries}, parameters)


def _parameter_names(optimizer: Optimizer, model: nn.Module, *, strict: bool) -> list[list[str | nn.Parameter]]:
    """The parameters of each group of the optimizer: by name, or the parameter itself if it is not the model's."""
    names = names_by_id(model)
    groups: list[list[str | nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if strict and id(parameter) not in names:
                raise SetupError(
                    f"group {number} of the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not "
                    "in the model, so its gradient would differ between ranks: put all trained parameters into one "
                    "module, or make an optimizer of several models after parallelize, and pass it to run.register"
                )
        groups.append([names.get(id(parameter), parameter) for parameter in group["params"]])
    return groups


def _check_attributes(optimizer: Optimizer) -> None:
    """Raise SetupError if the optimizer keeps parameters that were replaced in attributes beside its groups."""
    for attribute, value in vars(optimizer).items():
        for leaf in pytree.leaves(value):
            if name := replaced_name(leaf):
                raise SetupError(
                    f"{type(optimizer).__name__} keeps the parameter {name!r} in its attribute {attribute!r} too, and "
                    "parallelize has replaced it: make the optimizer after parallelize, and pass it to run.register"
                )


def _mark(parameter: torch.Tensor, name: str) -> None:
    """Have the steps of optimizers be refused that hold ``parameter``, which has been replaced."""
    if not replaced_name(parameter):
        setattr(parameter, _MARK, name)
        _watch_steps()


def replaced_name(value: Any) -> str | None:
    """The name in its model of a parameter that `rebind_optimizers` has replaced; None of anything else."""
    return cast("str | None", getattr(value, _MARK, None)) if isinstance(value, torch.Tensor) else None


@functools.cache
def _watch_steps() -> None:
    """Have the steps of all optimizers be checked. A second call does nothing."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: _refuse_replaced(optimizer))


def _refuse_replaced(optimizer: Optimizer) -> None:
    """Raise SetupError if ``optimizer`` holds parameters that were replaced."""
    names = [name for parameter in parameters_in(optimizer) if (name := replaced_name(parameter))]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise SetupError(
            f"{type(optimizer).__name__} holds the parameter {names[0]!r}{others} that parallelize has replaced, so it "
            "would train nothing: pass all optimizers, as in run.parallelize(model, [first, second]), or make them "
            "after parallelize"
        )
