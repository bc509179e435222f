"""adapt(): the adapter of an object that a script saves."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint.adapters.fsdp1 import FSDP1ModuleState, FSDP1OptimizerState, has_fsdp1
from flk_runtime.checkpoint.adapters.module import ModuleState
from flk_runtime.checkpoint.adapters.optimizer import OptimizerState, count_parameters, trained_modules
from flk_runtime.checkpoint.adapters.torch_state import Modules, TorchState
from flk_runtime.checkpoint.stateful import Stateful, Values
from flk_runtime.errors import SetupError


def adapt(name: str, thing: Any, modules: Modules) -> Stateful | TorchState:
    """The adapter of ``thing``, which is saved under ``name`` together with these modules.

    Raises SetupError if it cannot be saved, or is an optimizer of parameters that are in none of the modules.
    """
    if isinstance(thing, nn.Module):
        return FSDP1ModuleState(thing) if has_fsdp1(thing) else ModuleState(thing)
    if isinstance(thing, Optimizer):
        return _adapt_optimizer(name, thing, modules)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        adapted: Stateful = thing
        return adapted
    if isinstance(thing, MutableMapping):
        return Values(thing)
    raise SetupError(
        f"{name} is a {type(thing).__name__}: pass modules, optimizers, objects with state_dict and load_state_dict, "
        "or dictionaries"
    )


def _adapt_optimizer(name: str, optimizer: Optimizer, modules: Modules) -> TorchState:
    trained, missing = trained_modules(optimizer, modules)
    if missing:
        raise SetupError(
            f"{name} is an optimizer of {count_parameters(optimizer)} parameters, and {missing} of them are in none of "
            "the modules: pass their module too"
        )
    if not any(has_fsdp1(module) for module in trained.values()):
        return OptimizerState(optimizer, trained)
    if len(trained) == 1:
        return FSDP1OptimizerState(trained, optimizer)
    raise SetupError(
        f"{name} is an optimizer of {len(trained)} modules, {' and '.join(trained)}, and FSDP1 wraps one of them: make "
        "an optimizer for each, or put them into one module"
    )
