"""Strategy ddp: every rank holds the whole model, in torch's DistributedDataParallel, which averages gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from flk_runtime.distributed import synchronize
from flk_runtime.errors import SetupError
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.system.torch_private import rebuild_buckets


class DDPModel(ParallelModel):
    """A model in DistributedDataParallel."""

    module: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device, *, find_unused_parameters: bool) -> None:
        """Wrap ``model``, which is on ``device``; rank 0's parameters and buffers are sent to all ranks. Collective."""
        try:
            module = _Wrapper(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                # Else a gradient that a script drops and keeps would be overwritten by the next backward pass.
                gradient_as_bucket_view=False,
                find_unused_parameters=find_unused_parameters,
            )
        except RuntimeError as error:
            if "Invalid scalar type" not in str(error):
                raise
            raise SetupError(
                "strategy ddp with complex parameters on CPUs needs torch 2.9 or newer, and this is torch "
                f"{torch.__version__}: update torch"
            ) from error
        super().__init__(model, module)
        self.beside = {"order": GradientOrder(module, self.trained())}

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.module.no_sync()

    def replicas(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD


class FrozenModel(ParallelModel):
    """A model that is not trained, such as a reference model: DDP does not wrap it, since it averages nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Send rank 0's parameters and buffers to all ranks. Collective."""
        super().__init__(model)
        synchronize(model)

    def replicas(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD


class _Wrapper(DistributedDataParallel):
    """Has the attributes of the model, such as a method ``generate``, as a model under another strategy has them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)


class GradientOrder:
    """The order in which gradients became ready in the first backward pass. It is a `flk_runtime.checkpoint.Stateful`.

    DDP assigns gradients to buckets when it is made, and again in this order before its second forward pass. A run that
    is resumed needs those buckets from its first step on: in other buckets, the sums of three ranks or more differ in
    the last bit.
    """

    def __init__(self, module: DistributedDataParallel, trained: Mapping[str, nn.Parameter]) -> None:
        """``trained``: the parameters of ``module`` that have a gradient. It has not been called yet."""
        self._module, self._trained = module, trained
        self._names: list[str] = []
        self._hooks: list[RemovableHandle] = []
        if not module.find_unused_parameters:  # else DDP keeps the buckets that it began with
            for name, parameter in trained.items():
                hook = functools.partial(self._note, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def state_dict(self) -> dict[str, Any]:
        """The names of the parameters in this order; none until all have got a gradient."""
        return {"names": [] if self._hooks else self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make DDP assign gradients to buckets in a saved order. Collective."""
        names = state["names"]
        if self._module.find_unused_parameters or set(names) != self._trained.keys():
            return
        self._names = names
        self._finish()
        rebuild_buckets(self._module, {id(self._trained[name]): place for place, name in enumerate(names)})

    def _note(self, name: str, _: torch.Tensor) -> None:
        if self._module.require_backward_grad_sync:
            self._names.append(name)
            if len(self._names) == len(self._hooks):
                self._finish()

    def _finish(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
