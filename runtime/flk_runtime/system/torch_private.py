"""All private names of torch that the runtime uses, each with its reason and the release in which it may go.

Nothing here replaces a part of torch. torch is imported inside of functions: a rank imports this module before torch.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer


def default_store() -> Any:
    """The store of the default process group: a script may have opened it with one that flk does not know.

    May go with 2.13 as the oldest torch, whose ProcessGroup has get_group_store().
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def abort_group() -> None:
    """End NCCL's communicators without waiting for their kernels, which do not end if a peer is dead.

    May go with 2.13 as the oldest torch, whose ProcessGroup has abort().
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._abort_process_group()


def assign_buckets(module: DistributedDataParallel) -> None:
    """Have DDP assign gradients to buckets now, those of the last parameters first, and keep these. Collective.

    DDP does it after its first backward pass, in the order in which gradients became ready. A resumed training would
    begin with other buckets than those that it was stopped with, and in other buckets sums of three ranks differ in the
    last bit. May go when DDP takes the order as an argument.
    """
    ddp: Any = module
    parameters, sparse = (list(reversed(found)) for found in ddp._build_params_for_reducer())
    names = ddp._build_debug_param_to_name_mapping(parameters)
    # A reducer takes this order of its parameters for the one in which the gradients became ready.
    ddp._ddp_init_helper(parameters, sparse, names, static_graph=False)
    ddp.reducer._push_all_rebuilt_params()
    ddp._has_rebuilt_buckets = bool(ddp.reducer._rebuild_buckets())


def complete_optimizer(optimizer: Optimizer) -> None:
    """Give an optimizer whose constructor does not call torch's, as many wrappers of another one do, its hooks.

    May go when register_step_pre_hook works without.
    """
    from torch.optim import Optimizer

    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        if not hasattr(optimizer, "defaults"):  # else it may be a property
            optimizer.defaults = {}
        step = optimizer.step  # perhaps a scheduler's around that of the class
        vars(optimizer).update(
            {
                f"_optimizer_{method}_{when}_hooks": OrderedDict()
                for method in ("step", "state_dict", "load_state_dict")
                for when in ("pre", "post")
            }
        )
        optimizer._zero_grad_profile_name = f"Optimizer.zero_grad#{type(optimizer).__name__}.zero_grad"
        if not hasattr(step, "hooked"):  # not in the class, as torch does it: others of the class may have no hooks
            optimizer.step = Optimizer.profile_hook_step(  # type: ignore[method-assign]
                functools.wraps(step)(lambda _, *args, **kwargs: step(*args, **kwargs))
            ).__get__(optimizer)


def flight_recorder(name: str) -> Callable[..., Any] | None:
    """The function of torch's bindings that tells the traces of a recorder; None while torch is not imported.

    May go when torch.distributed has a function for the traces of a running process.
    """
    return getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)


def skip_code(code: CodeType) -> None:
    """Have the compiler not trace functions with ``code``. May go when torch.compiler.disable() skips hooks, too."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def dispatch_mode() -> type[Any]:
    """The class TorchDispatchMode, which torch documents, in a private module. May go when it is public."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def is_profiled() -> bool:
    """Whether a profiler runs in this process, beside which another one fails. May go when torch.profiler says so."""
    import torch

    return bool(torch.autograd.profiler._is_profiler_enabled)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors in few kernels, without waiting for a GPU. May go when torch has a public copy of lists."""
    import torch

    torch._foreach_copy_(targets, sources, non_blocking=True)
