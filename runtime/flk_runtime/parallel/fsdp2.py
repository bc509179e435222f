"""FSDP2: torch's fully_shard, which makes each parameter a DTensor whose rows are split over the ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from flk_runtime.distributed import broadcast, parameters_in
from flk_runtime.errors import SetupError
from flk_runtime.parallel.blocks import inner_first, kept_units, sharded_units
from flk_runtime.parallel.initialize import allocate, place
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.options import ParallelOptions
from flk_runtime.system import pytree


class FSDP2Model(ParallelModel):
    """A model whose blocks are sharded in place. The user calls the same object as before."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        options: ParallelOptions,
        *,
        broadcast: bool,
        reshards: bool,
    ) -> None:
        """Shard ``model`` in place, each of ``blocks`` on its own. Collective.

        Unless ``options`` name the blocks, the embedding and the head are sharded on their own too.
        ``broadcast``: send rank 0's values to all ranks before. ``mesh`` has the dimension shard, or replicate and
        shard. ``reshards``: free a block's full parameters after its forward pass. Parameters outside of blocks and of
        a head are kept, since the backward pass needs them first.
        """
        precision, ends = options.precision, options.blocks is None

        def shard(block: nn.Module) -> None:
            for parameter in block.parameters():  # fully_shard refuses others, such as those in channels_last
                if not parameter.is_contiguous():
                    parameter.data = parameter.data.contiguous()
            # Outputs that a block computes in float32 stay float32, such as a loss of its router.
            policy = (
                MixedPrecisionPolicy(
                    param_dtype=precision.param_dtype(block),
                    reduce_dtype=precision.reduce,
                    output_dtype=precision.output_dtype(block, root=block is model),
                )
                if precision
                else MixedPrecisionPolicy()
            )
            fully_shard(block, mesh=mesh, reshard_after_forward=reshards and block not in kept, mp_policy=policy)

        units = sharded_units(model, blocks, precision, ends=ends)
        kept = kept_units(model, units, ends=ends)
        waiting: list[nn.Module] = []
        moved: dict[torch.Tensor, torch.Tensor] = {}
        for module in inner_first(model):
            waiting.append(module)
            if module is model or module in units:
                # Unit by unit, so that no device holds all of the model.
                place(waiting, device, moved, broadcast=broadcast)
                shard(module)
                waiting = []
        allocate(model, device)
        super().__init__(model)
        self._units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._full: dict[nn.Parameter, nn.Parameter] = {}  # by shard: torch makes each full parameter once
        for module in self._units:  # now, since one that is made in inference_mode() cannot be trained
            shards = list(module.parameters())
            module.unshard()
            self._full |= dict(zip(shards, module.parameters(), strict=True))
            module.reshard()
        model.register_forward_hook(self._after_pass)
        # With this name, generate() of Transformers takes as many steps on each rank as on the others.
        model._is_fsdp_managed_module = True  # type: ignore[assignment]
        self._extend_zero_grad(model, lambda: self._full)
        self.replicas = mesh.get_group("replicate") if "replicate" in (mesh.mesh_dim_names or ()) else None
        self._keeps_full, self._communicates = not reshards, mesh.size() > 1
        self._tied: list[str] = []  # buffers that rank 0 sends
        self._sends = True  # them at the next forward pass
        self._syncs = True  # gradients now
        self._unreduced = False  # the latest backward pass was in no_sync
        # Gradients of passes in no_sync are then added up where torch shows them to nobody.
        self._adds_apart = precision is not None and any(
            precision.param_dtype(module) != precision.reduce for module in self._units
        )
        if options.find_unused_parameters:
            for module in self._units:
                module.set_reduce_scatter_unused_params(True, recurse=False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._set_communication(False)
        try:
            yield
        finally:
            self._set_communication(True)

    def loose_buffers(self) -> dict[str, torch.Tensor]:
        if not self._communicates:
            return {}
        return {
            name: buffer for name, buffer in self.model.named_buffers() if name not in self._tied and buffer.numel()
        }

    def tie_buffers(self, names: Iterable[str]) -> None:
        if not self._tied:
            self.model.register_forward_pre_hook(self._send_buffers)
        self._tied += names

    def attach(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(self._before_step)
        self._extend_zero_grad(optimizer, lambda: parameters_in(optimizer))

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        like: Any = parameter
        # Every rank has all of it, so nothing is communicated.
        replicated = DTensor.from_local(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
        shard: torch.Tensor = replicated.redistribute(placements=like.placements)
        return shard.to(like.device, copy=True)  # not a view, which would keep all of ``full`` alive

    def _set_communication(self, enabled: bool) -> None:
        self._syncs = enabled
        for module in self._units:
            module.set_requires_gradient_sync(enabled, recurse=False)
            if self._keeps_full:  # one all-gather then serves all passes
                module.set_reshard_after_backward(enabled, recurse=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _send_buffers(self, *_: Any) -> None:
        """Send rank 0's buffers before those forward passes before which DDP does."""
        if self._sends:
            # Not a change to autograd: a forward pass before this one may have kept them for its backward pass.
            broadcast(self.model.get_buffer(name).data for name in self._tied)
        self._sends = self._syncs and torch.is_grad_enabled()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_pass(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Free full parameters that no backward pass will free: a script would change them in place of the shards.

        Else note at the backward pass whether it reduces the gradients, with those that others have left.
        """
        if not torch.is_grad_enabled():
            self._reshard()
            return
        for leaf in pytree.leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(self._note_backward)  # type: ignore[no-untyped-call]

    def _note_backward(self, _: torch.Tensor) -> None:
        self._unreduced = not self._syncs

    def _before_step(self, *_: Any) -> None:
        """Refuse a step without the gradients of the latest pass, and free full parameters, which it does not change.

        A forward pass with gradients, which no backward pass follows, leaves those.
        """
        if self._unreduced:
            raise SetupError(
                "the latest backward pass before optimizer.step() was in no_sync, so the step would lack its "
                "gradients: leave the last backward pass before each step out of no_sync"
            )
        self._reshard()

    def _reshard(self) -> None:
        for module in self._units:
            module.reshard()

    def _extend_zero_grad(self, owner: nn.Module | Optimizer, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Have ``zero_grad`` of the model or an optimizer drop all gradients of its ``parameters`` at any time.

        After a forward pass full parameters are in the place of shards, so that a model's shards would keep theirs. A
        backward pass in no_sync leaves gradients of full parameters, which nobody sees.
        """
        plain = owner.zero_grad

        @functools.wraps(plain)
        def zero_grad(set_to_none: bool = True) -> None:
            if self._unreduced and self._adds_apart:
                raise SetupError(
                    "zero_grad() after a backward pass in no_sync would keep its gradients, which precision= adds up "
                    "apart: make a backward pass outside of no_sync before, as of the loss times 0"
                )
            plain(set_to_none)
            for shard in parameters():
                if (whole := self._full.get(shard)) is None:
                    continue  # of another model
                whole.grad = None
                if set_to_none:
                    shard.grad = None
                elif shard.grad is not None:
                    shard.grad.detach().zero_()
            self._unreduced = any(whole.grad is not None for whole in self._full.values())

        owner.zero_grad = zero_grad  # type: ignore[method-assign]
