"""Distributed: the process group, collectives on pytrees and consistency checks.

`optimizer` averages gradients for `DistributedOptimizer`.

Everything here needs torch and, unless it says otherwise, an open process group. The packages above (data, preflight,
checkpoint, parallel) and `training` and `check` import it; the launcher may not.
"""

from flk_runtime.distributed.broadcast_state import broadcast, synchronize
from flk_runtime.distributed.collectives import all_reduce
from flk_runtime.distributed.consistency import (
    check_consistent,
    differing,
    find_difference,
    first_far,
    has_fsdp1,
    parameters_in,
)
from flk_runtime.distributed.main_process import main_process_first
from flk_runtime.distributed.process_group import comm_device, mean_loss

__all__ = [
    "all_reduce",
    "broadcast",
    "check_consistent",
    "comm_device",
    "differing",
    "find_difference",
    "first_far",
    "has_fsdp1",
    "main_process_first",
    "mean_loss",
    "parameters_in",
    "synchronize",
]
