"""Adapters from modules and optimizers to the state in a checkpoint: one for each way in which torch wraps a module.

`ModuleState` is for a module that is plain, or wrapped in DDP or FSDP2, and `OptimizerState` for an optimizer of such
modules; runs and `flk_runtime.save` use both alike. `fsdp1` calls torch's own functions for a module that a script has
wrapped in FSDP1. All names are the same as in torch.distributed.checkpoint.state_dict: the names of the user's module.
"""

from flk_runtime.checkpoint.adapters.adapt import adapt, module_state, optimizer_state
from flk_runtime.checkpoint.adapters.module import ModuleState
from flk_runtime.checkpoint.adapters.optimizer import OptimizerState, load_as_saved, trained_modules
from flk_runtime.checkpoint.adapters.torch_state import Modules, TorchState
from flk_runtime.checkpoint.adapters.wrappers import Parts, is_sharded, parameters_of, reshard, roots_of, user_name

__all__ = [
    "ModuleState",
    "Modules",
    "OptimizerState",
    "Parts",
    "TorchState",
    "adapt",
    "is_sharded",
    "load_as_saved",
    "module_state",
    "optimizer_state",
    "parameters_of",
    "reshard",
    "roots_of",
    "trained_modules",
    "user_name",
]
