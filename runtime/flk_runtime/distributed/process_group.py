"""What the ranks tell each other beside gradients: small, on the CPU where gloo is there, else on the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flk_runtime.errors import SetupError

T = TypeVar("T")

_CPU = torch.device("cpu")
_REST = 0.02  # seconds
_kept: list[Any] = []


def on_main(function: Callable[[], T]) -> T:
    """What rank 0 gets from ``function``, on every rank. A SetupError is raised on every rank, so that none waits."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except SetupError as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def broadcast_bytes(content: bytes | None) -> bytes:
    """Rank 0's ``content`` on every rank, without pickling it."""
    size = on_main(lambda: len(content or b""))
    device = comm_device(_CPU)
    if dist.get_rank() == 0:
        data = torch.frombuffer(bytearray(content or b""), dtype=torch.uint8).to(device)
    else:
        data = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return bytes(data.cpu().numpy()) if content is None else content


def broadcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's ``tensor``, which lies on the CPU, on every rank's CPU; the others give its shape and dtype (meta)."""
    data = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.contiguous()
    # As bytes: not every backend knows every dtype.
    raw = data.flatten().view(torch.uint8).to(comm_device(_CPU))
    dist.broadcast(raw, src=0)
    return raw.cpu().view(data.dtype).view(data.shape)


def all_agree(yes: bool) -> Callable[[], bool]:
    """Ask all ranks. Returns at once; what it returns waits for their answers, and says whether all said yes."""
    answers = torch.tensor([int(yes)], device=comm_device(_CPU))
    work = dist.all_reduce(answers, op=dist.ReduceOp.MIN, async_op=True)

    def wait() -> bool:
        work.wait()
        return bool(answers.item())

    return wait


def gather(value: Any) -> list[Any] | None:
    """Every rank's ``value`` in the order of ranks, on rank 0; None elsewhere."""
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def mean(value: float, weight: float) -> float:
    """The mean of every rank's ``value``, weighted, on every rank; NaN where all weights are 0."""
    total = torch.tensor([value * weight, weight], dtype=torch.float64, device=comm_device(_CPU))
    dist.all_reduce(total)
    return float(total[0] / total[1])


class Timeouts:
    """How long a collective may take: ``first`` seconds until the first step is done, then ``step`` seconds if given.

    The first step compiles, allocates and connects; later ones are alike, so that one which hangs can be noticed soon
    (torchtitan, torchtitan/distributed/utils.py, set_pg_timeouts). Methods are collective.
    """

    def __init__(self, first: float, step: float | None) -> None:
        self._first, self._step = first, step
        self._short = False

    def shorten(self) -> None:
        """The first step is done: from here on ``step`` holds."""
        if self._step is not None:
            self._set(self._step)
            self._short = True

    @contextlib.contextmanager
    def long(self) -> Iterator[None]:
        """Let ``first`` hold inside, where some ranks wait while others do slow work, such as writing a snapshot."""
        if self._step is None or not self._short:
            yield
            return
        self._set(self._first)
        yield
        self._set(self._step)

    def _set(self, seconds: float) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        # No rank may wait with the old patience for one that has the new: all set it when nothing is under way.
        dist.barrier()
        for group in list(_groups()):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def can_set_timeout() -> bool:
    """Whether this torch lets a group's timeout be changed; it does so by a private function."""
    return hasattr(distributed_c10d, "_set_pg_timeout")


def _groups() -> list[Any]:
    """All groups that this rank is in, those of device meshes too."""
    return [group for group in distributed_c10d._world.pg_map if not distributed_c10d._rank_not_in_group(group)]


def leave(*, at_once: bool) -> None:
    """Give up the process group. ``at_once``: without waiting for a peer, which may have died."""
    if not dist.is_initialized():
        return
    # A gloo group's destructor joins its threads while it holds Python's lock, which one of them may still want to free
    # a tensor: seen to hang, seldom, in processes that ended. So the object stays, and the threads get time to come to
    # rest.
    _kept.append(dist.group.WORLD)
    time.sleep(_REST)
    if at_once and "nccl" in str(dist.get_backend_config()):
        # Destroying NCCL's communicators waits for kernels that a dead peer never lets end.
        distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def comm_device(device: torch.device) -> torch.device:
    """Where a tensor of ``device`` has to lie for the process group to take it: there, or where its backend works."""
    served = [entry.partition(":")[0] for entry in str(dist.get_backend_config()).split(",")]
    if device.type in served:
        return device
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.cuda.current_device() if served[0] == "cuda" else 0)
