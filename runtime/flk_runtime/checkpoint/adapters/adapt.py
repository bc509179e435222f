"""The adapters of modules and optimizers; and adapt(), the adapter of any object that a script saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint.adapters.fsdp1 import FSDP1ModuleState, FSDP1OptimizerState
from flk_runtime.checkpoint.adapters.module import ModuleState
from flk_runtime.checkpoint.adapters.optimizer import OptimizerState, trained_modules
from flk_runtime.checkpoint.adapters.placed import placed
from flk_runtime.checkpoint.stateful import Declared, DistributedStateful, Modules, Stateful, inside_of, stateful_of
from flk_runtime.distributed import has_fsdp1, parameters_in
from flk_runtime.errors import SetupError


def module_state(module: nn.Module) -> ModuleState:
    """The state of a module, however it is wrapped."""
    return FSDP1ModuleState(module) if has_fsdp1(module) else ModuleState(module)


def optimizer_state(name: str, optimizer: Optimizer, modules: Modules) -> OptimizerState:
    """The state of ``optimizer``, which is saved under ``name``, by the names of the parameters of ``modules``.

    Raises SetupError if they are several, and one is wrapped in FSDP1.
    """
    if not any(has_fsdp1(module) for module in modules.values()):
        return OptimizerState(optimizer, modules)
    if len(modules) == 1:
        return FSDP1OptimizerState(optimizer, modules)
    raise SetupError(
        f"{name} is an optimizer of {len(modules)} modules, {' and '.join(modules)}, and FSDP1 wraps one of them: make "
        "an optimizer for each, or put them into one module"
    )


def adapt(name: str, thing: Any, objects: Mapping[str, Any]) -> Stateful | DistributedStateful:
    """The adapter of ``thing``, which is saved under ``name`` together with these objects.

    Raises SetupError if it cannot be saved, or is an optimizer of parameters that are in none of the modules.
    """
    modules = {key: each for key, each in objects.items() if isinstance(each, nn.Module)}
    if isinstance(thing, Declared) and isinstance(thing.thing, Optimizer):
        return placed(thing, [each for each in map(inside_of, objects.values()) if isinstance(each, nn.Module)])
    if isinstance(thing, nn.Module):
        return module_state(thing)
    if isinstance(thing, Optimizer):
        return _adapt_optimizer(name, thing, modules)
    if (adapted := stateful_of(thing)) is not None:
        return adapted
    raise SetupError(
        f"{name} is a {type(thing).__name__}: pass modules, optimizers, objects with state_dict and load_state_dict, "
        "or dictionaries"
    )


def _adapt_optimizer(name: str, optimizer: Optimizer, modules: Modules) -> DistributedStateful:
    trained, missing = trained_modules(optimizer, modules)
    if missing:
        raise SetupError(
            f"{name} is an optimizer of {len(parameters_in(optimizer))} parameters, and {missing} of them are in none "
            "of the modules: pass their module too"
        )
    return optimizer_state(name, optimizer, trained)
