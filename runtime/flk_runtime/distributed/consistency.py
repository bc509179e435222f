"""check_consistent(): before a collective, check that all ranks are about to call the same one on the same structure.

A collective whose tensors differ between ranks hangs, crashes in C++ or computes wrong numbers. One all-reduce of a
hash finds that out beforehand; only if it differs do the ranks exchange their lines, to name the first difference.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.contract.quantities import numbered
from flk_runtime.distributed.process_group import all_gather, comm_device, maximum
from flk_runtime.errors import SetupError
from flk_runtime.system import device as devices
from flk_runtime.system.bits import bit_sum

_TOLERANCE: Final = 1e-5  # of a tensor's norm, since devices of several types round differently
_ROUNDINGS: Final = 4  # of each value, which are more than that in a dtype of few digits

Line = tuple[str, str]  # a path in the structure, and a description of the value there


def parameters_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_fsdp1(module: nn.Module) -> bool:
    """Whether ``module`` or a submodule is wrapped in FSDP1, whose parameters are shards and do not say so."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and imported already if there is one
    return fsdp is not None and any(isinstance(child, fsdp.FullyShardedDataParallel) for child in module.modules())


def check_consistent(call: str, lines: Sequence[Line]) -> None:
    """Check that all ranks give the same ``call`` and ``lines``. Collective: one all-reduce of 16 bytes.

    ``call`` names what the rank is about to do. Raises SetupError on every rank, with the first difference and the
    ranks on each side, if any rank gives another one.
    """
    if found := find_difference(call, lines):
        raise SetupError(f"{call}: the ranks differ, so nothing was exchanged: {found}")


def find_difference(call: str, lines: Sequence[Line]) -> str | None:
    """The first difference between the ranks' ``lines``, in words, with the ranks on each side. Collective.

    None if there is none. ``call`` names where the rank is, and is compared too.
    """
    lines = [("the call", call), *lines]
    own = int.from_bytes(hashlib.blake2b(repr(lines).encode(), digest_size=8).digest(), "big") >> 1
    largest, negative_smallest = maximum(own, -own)
    if largest == -negative_smallest:
        return None
    digests = all_gather(own)
    usual, _ = Counter(digests).most_common(1)[0]  # of several, the digest of the lowest rank
    first, other = digests.index(usual), next(rank for rank, one in enumerate(digests) if one != usual)
    contents = [list(lines)], [list(lines)]
    for content, rank in zip(contents, (first, other), strict=True):
        dist.broadcast_object_list(content, src=rank)
    return difference(
        contents[0][0],
        contents[1][0],
        numbered("rank", (rank for rank, one in enumerate(digests) if one == usual)),
        numbered("rank", (rank for rank, one in enumerate(digests) if one == digests[other])),
    )


def difference(here: Sequence[Line], there: Sequence[Line], these: str, those: str) -> str:
    """The first difference between two lists of lines; ``these`` and ``those`` name the ranks that have them."""
    here_lines, there_lines = dict(here), dict(there)
    for path in here_lines | there_lines:
        one, other = here_lines.get(path, "missing"), there_lines.get(path, "missing")
        if one != other:
            return f"{path} is {one} on {these}, and {other} on {those}"
    return f"{these} and {those} have the same entries in another order"


@torch.no_grad()
def first_far(
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    parts: Mapping[str, torch.Tensor] | None = None,
) -> str | None:
    """The first of ``tensors`` whose replicas in a ``group`` differ by more than rounding. Collective of all ranks.

    ``parts`` are the rows whose bits are compared; None: all. Where they differ, the whole tensor tells what is
    rounding.
    """
    apart = differing(tensors if parts is None else parts, group)
    return next((name for name in apart if _is_far(tensors[name], group)), None)


def differing(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> list[str]:
    """The names of the ``tensors`` that differ in any ``group`` of ranks. Collective of all ranks.

    All ranks of a group have the same names in the same order, and shapes and dtypes too.
    """
    if not tensors:
        return []
    devices.synchronize()  # the script may step on a stream of its own
    device = comm_device(torch.device("cpu"))
    sums = torch.stack([bit_sum(tensor).to(device) for tensor in tensors.values()])
    extremes = torch.cat((sums, ~sums))  # the least integer has no negative
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    differs = (extremes[: len(sums)] != ~extremes[len(sums) :]).to(torch.int32)
    if group is not None and group.size() < dist.get_world_size():
        dist.all_reduce(differs, dist.ReduceOp.MAX)  # of all shards
    return [name for name, found in zip(tensors, differs.tolist(), strict=True) if found]


def _is_far(values: torch.Tensor, group: Any) -> bool:
    """Whether ``values`` differ between replicas by more than rounding. Collective of all ranks."""
    first = values.to(comm_device(values.device), copy=True)
    dist.broadcast(first, dist.get_global_rank(group, 0), group)
    first = first.to(values.device)
    sizes = first.abs()
    norm = sizes[sizes.isfinite()].double().norm()
    distance = (values - first).abs().masked_fill(values == first, 0).double().norm()  # inf - inf is NaN
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(values.dtype).eps)
    far = torch.stack([(~(distance <= tolerance * norm)).int()]).to(comm_device(torch.device("cpu")))
    dist.all_reduce(far, dist.ReduceOp.MAX)
    return bool(far.item())
