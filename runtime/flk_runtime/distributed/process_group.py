"""Small control-plane collectives, timeouts and the end of the process group.

Collectives run on gloo if the group has a CPU backend, else on the device.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from flk_runtime.discovery import RankInfo, discover
from flk_runtime.errors import DiscoveryError, RuntimeFailure
from flk_runtime.system import torch_private

T = TypeVar("T")

_CPU = torch.device("cpu")
_THREADS_END = 0.02  # seconds
_kept: list[Any] = []  # process groups that were left; see leave()


def rank() -> int:
    """This process's rank; 0 where no process group is open."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 where no process group is open."""
    return dist.get_world_size() if dist.is_initialized() else 1


def place() -> RankInfo:
    """The rank, the local rank and the node of this process, as its launcher's variables say.

    A script may have started its ranks itself, as by torch.multiprocessing. Then the open process group has another
    world size than the variables: it says the rank, and the names of the hosts say the local rank. Collective then.
    """
    if not dist.is_initialized():
        return discover()
    with contextlib.suppress(DiscoveryError):
        if (found := discover()).world_size == dist.get_world_size():
            return found
    own, nodes = dist.get_rank(), all_gather(socket.gethostname())
    local = [each for each, node in enumerate(nodes) if node == nodes[own]]
    distinct = list(dict.fromkeys(nodes))
    return RankInfo(
        own,
        local.index(own),
        len(nodes),
        len(local),
        node_rank=distinct.index(nodes[own]),
        launcher="script",
        nodes=len(distinct),
    )


def store() -> Any:
    """The store of the process group, or one of this process alone where no group is open."""
    return torch_private.default_store() if dist.is_initialized() else dist.HashStore()  # type: ignore[attr-defined]


def on_main(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 and return its result on every rank. Collective.

    The result travels by pickle. A RuntimeFailure of ``function`` is raised on every rank.
    """
    if world_size() == 1:
        return function()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except RuntimeFailure as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return cast("T", answer[0])


def sums(*values: int) -> Callable[[], list[int]]:
    """Start to add up all ranks' values, one for each argument; the returned function waits for them. Collective."""
    return _reduce(values, dist.ReduceOp.SUM)


def all_true(flag: bool) -> bool:
    """Whether ``flag`` is true on all ranks. Collective."""
    return sums(int(flag))() == [world_size()]


def maximum(*values: int) -> list[int]:
    """The largest of all ranks' values, one for each argument, on every rank. Collective."""
    return _reduce(values, dist.ReduceOp.MAX)()


def _reduce(values: Sequence[int], operation: Any) -> Callable[[], list[int]]:
    """Start to reduce all ranks' values; the returned function waits for what comes of them. Collective."""
    if world_size() == 1:
        return lambda: list(values)
    reduced = torch.tensor(values, device=comm_device(_CPU))
    work = dist.all_reduce(reduced, op=operation, async_op=True)

    def wait() -> list[int]:
        work.wait()
        return [int(number) for number in reduced.tolist()]

    return wait


def decide(value: Any, choose: Callable[[list[Any]], T]) -> T:
    """Call ``choose`` on rank 0 with the values of all ranks, and return its result on every rank. Collective.

    The values are in the order of ranks, and travel by pickle. Results and errors are as in `on_main`.
    """
    if world_size() == 1:
        return choose([value])
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return on_main(lambda: choose(values or []))


def all_gather(value: T) -> list[T]:
    """The values of all ranks in the order of ranks, on every rank. Collective; values travel by pickle."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


Numbers = float | torch.Tensor | Sequence[float | torch.Tensor]


def mean(value: Numbers, weight: Numbers) -> float:
    """The weighted mean of all ranks' values (float64), on every rank; NaN if all weights are 0. Collective.

    A rank gives one value, or a sequence or a tensor of any number, with one weight for all or as many weights. Values
    of weight 0 may be NaN.
    """
    values, weights = _flat(value), _flat(weight)
    weights = weights.expand_as(values)
    sums = torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def mean_loss(closure: Callable[[], Any]) -> Any:
    """Call ``closure`` and return its loss, whose value is the mean over the ranks. Collective.

    Any other result is returned as it is.
    """
    loss = closure()
    if not isinstance(loss, (float, torch.Tensor)):
        return loss
    value = mean(loss, 1.0)
    if isinstance(loss, float):
        return value
    loss = loss.clone()  # with the gradients of this rank's loss
    loss.data.fill_(value)
    return loss


def full(value: T) -> T:
    """The full tensor, gathered from the shards of a DTensor; any other value as it is. Collective among its ranks."""
    return cast("T", value.full_tensor() if hasattr(value, "full_tensor") else value)


def _flat(numbers: Numbers) -> torch.Tensor:
    """Float64 of shape (count,), on the device of collectives."""
    if isinstance(numbers, Sequence):
        numbers = [float(number.detach() if isinstance(number, torch.Tensor) else number) for number in numbers]
    return torch.as_tensor(full(numbers), dtype=torch.float64, device=comm_device(_CPU)).detach().reshape(-1)


def leave(*, at_once: bool) -> None:
    """Destroy the process group. With ``at_once``, do not wait for other ranks, which may be dead, nor raise."""
    if not dist.is_initialized():
        return
    # The destructor of a gloo group joins its threads while it holds the GIL, which a thread may still need to free a
    # tensor: a rare deadlock at the end of a process. So the group object is kept, and its threads get time to end.
    _kept.append(dist.group.WORLD)
    time.sleep(_THREADS_END)
    errors = (RuntimeError,) if at_once else ()  # the GPU may have the error that ends this rank, and NCCL meets it too
    with contextlib.suppress(*errors):
        if at_once and "nccl" in str(dist.get_backend_config()):
            torch_private.abort_group()
        else:
            dist.destroy_process_group()


def comm_device(device: torch.device) -> torch.device:
    """The device to which a tensor on ``device`` must be moved for a collective.

    It is ``device`` itself if a backend serves it, else the CPU if a backend serves that, else the backend's device.
    """
    served = [entry.partition(":")[0] for entry in str(dist.get_backend_config()).split(",")]
    if device.type in served:
        return device
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.cuda.current_device() if served[0] == "cuda" else 0)
