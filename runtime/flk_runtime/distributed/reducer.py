"""GradientReducer: averages flat gradient buckets over the ranks, by torch.distributed's or Horovod's collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flk_runtime.distributed.consistency import Line, check_consistent
from flk_runtime.distributed.process_group import comm_device
from flk_runtime.errors import SetupError

_groups: list[tuple[Any, Any]] = []  # pairs of a default process group and the group for gradients in it


class GradientReducer(Protocol):
    """Averages flat tensors in place while the backward pass continues."""

    world_size: int

    def check_consistent(self, call: str, lines: Sequence[Line]) -> None:
        """Raise SetupError on all ranks unless all give the same (see `consistency.check_consistent`). Collective."""

    def start(self, flat: torch.Tensor, name: str) -> Callable[[], None]:
        """Start to average ``flat``, a tensor of one dimension, in place; the returned function waits for the result.

        Collective: called in the same order on all ranks, with equal names and shapes.
        """


def gradient_reducer(collectives: str) -> GradientReducer:
    """The reducer for ``collectives``, "torch" or "horovod". Raises SetupError if it is not available."""
    if collectives == "torch":
        return _TorchReducer()
    if collectives == "horovod":
        return _HorovodReducer()
    raise SetupError(f"unknown collectives={collectives!r}: expected torch or horovod")


class _TorchReducer:
    """All-reduces in a process group of its own, so the script may call collectives between backward() and step()."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise SetupError("DistributedOptimizer needs the process group: call flk_runtime.init() before")
        self.world_size = dist.get_world_size()
        self._group = _own_group() if self.world_size > 1 else None

    def check_consistent(self, call: str, lines: Sequence[Line]) -> None:
        check_consistent(call, lines)

    def start(self, flat: torch.Tensor, name: str) -> Callable[[], None]:
        # Divided before, as DistributedDataParallel does: sums of float16 would overflow.
        flat.mul_(1 / self.world_size)
        sent = flat.to(comm_device(flat.device))
        work = dist.all_reduce(
            torch.view_as_real(sent) if sent.is_complex() else sent, group=self._group, async_op=True
        )

        def wait() -> None:
            work.wait()
            if sent is not flat:
                flat.copy_(sent)

        return wait


class _HorovodReducer:
    """Horovod's asynchronous all-reduce, whose background thread matches the tensors of all ranks by name."""

    def __init__(self) -> None:
        try:
            import horovod.torch as horovod
        except ImportError as error:
            raise SetupError(
                f"collectives='horovod' needs Horovod built with PyTorch, which cannot be imported here ({error}): "
                "install it with HOROVOD_WITH_PYTORCH=1, or use collectives='torch'"
            ) from None
        horovod.init()  # a second call does nothing
        self._horovod: Any = horovod
        self.world_size = int(horovod.size())
        if dist.is_initialized() and dist.get_world_size() != self.world_size:
            raise SetupError(
                f"collectives='horovod': Horovod has {self.world_size} ranks and the process group has "
                f"{dist.get_world_size()}: start the script with horovodrun, or use collectives='torch'"
            )

    def check_consistent(self, call: str, lines: Sequence[Line]) -> None:
        if dist.is_initialized():
            check_consistent(call, lines)

    def start(self, flat: torch.Tensor, name: str) -> Callable[[], None]:
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        handle = self._horovod.allreduce_async_(real, op=self._horovod.Average, name=f"flk.{name}")
        return lambda: self._horovod.synchronize(handle)


def _own_group() -> Any:
    """The group for gradients in the default process group, made at the first call. Collective."""
    world = dist.group.WORLD
    for known, group in _groups:
        if known is world:
            return group
    _groups.append((world, dist.new_group()))
    return _groups[-1][1]
