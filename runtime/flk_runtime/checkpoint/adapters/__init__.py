"""Adapters from modules and optimizers to the state in a checkpoint: one for each way in which torch wraps a module.

`ModuleState` is for a module that is plain, or wrapped in DDP or FSDP2, and `OptimizerState` for an optimizer of such
modules; runs and `flk_runtime.save` use both alike. `fsdp1` calls torch's own functions for a module that a script has
wrapped in FSDP1. All names are the same as in torch.distributed.checkpoint.state_dict: the names of the user's module.
"""
