"""MeshModel: a model that the script's own parallelism has split, and FSDP2 shards over the data's dimensions."""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from flk_runtime.checkpoint import Parts, module_state, parameters_of, roots_of
from flk_runtime.distributed import comm_device, parameters_in
from flk_runtime.errors import SetupError
from flk_runtime.parallel.fsdp2 import FSDP2Model
from flk_runtime.parallel.mesh import CONTEXT, PIPELINE, Mesh
from flk_runtime.parallel.model import full, local
from flk_runtime.parallel.options import ParallelOptions
from flk_runtime.parallel.silent_errors import gather_for_weights
from flk_runtime.system import pytree

_TOLERANCE: Final = 1e-2  # of the sum of absolute values: what the order of additions may change in a gradient


class MeshModel(FSDP2Model):
    """A model whose parameters may be DTensors of different meshes: of the data's dimensions, or of all."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[nn.Module],
        mesh: Mesh,
        device: torch.device,
        options: ParallelOptions,
        **more: Any,
    ) -> None:
        """Shard ``model`` as `FSDP2Model` does, after the script's function has split it.

        With a dimension pp, ``model`` is what this rank keeps of it, or `Parts` with its stages.
        """
        super().__init__(model, blocks, mesh.sharding, device, options, broadcast=False, resets=False, **more)
        self.mesh: Mesh = mesh
        names = mesh.own.mesh_dim_names or ()
        self._pipeline = mesh.own.get_group(PIPELINE) if PIPELINE in names else None
        if self._pipeline:
            self.saved = model if isinstance(model, Parts) else Parts([model])
            self.state = module_state(self.saved)
            gather_for_weights()
        self._whole = {each: name for name, each in parameters_of(model).items() if self._is_whole(each)}
        self._inputs: list[torch.Tensor] = []  # sums of the first forward pass's, if there is no whole parameter
        if not self._whole:
            self._first_call = roots_of(model)[0].register_forward_pre_hook(self._note_inputs, with_kwargs=True)

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        checked = False

        def check(*_: Any) -> None:  # it stays, since the optimizer calls other hooks after it
            nonlocal checked
            if not checked:
                checked = True
                _check_samplers(self.mesh.parts)
                self._compare(parameters_in(optimizer))

        optimizer.register_step_pre_hook(check)

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for each in self.model.parameters():
            if each.grad is not None:
                by_mesh.setdefault(each.device_mesh, []).append(each)  # type: ignore[attr-defined]
        norms = [
            full(nn.utils.get_total_norm([each.grad for each in group if each.grad is not None], norm_type))
            for group in by_mesh.values()
        ]
        total = nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite and not self._pipeline)
        if self._pipeline:
            stages = [torch.empty_like(total) for _ in range(dist.get_world_size(self._pipeline))]
            dist.all_gather(stages, total, self._pipeline)
            total = nn.utils.get_total_norm(stages, norm_type, error_if_nonfinite)
        for group in by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
        return total

    def replicas(self) -> dist.ProcessGroup | None:
        # The ranks of a stage alone cannot compare its parameters: that is collective of all ranks.
        return None if self._pipeline else super().replicas()

    def _is_whole(self, parameter: Any) -> bool:
        """Whether all ranks of the script's dimensions hold the same shard of ``parameter``."""
        data = self.mesh.sharding.mesh_dim_names or ()
        if not isinstance(parameter, DTensor):
            return False
        names = parameter.device_mesh.mesh_dim_names or ()
        return all(
            name in data or placement.is_replicate()
            for name, placement in zip(names, parameter.placements, strict=True)
        )

    def _compare(self, parameters: list[nn.Parameter]) -> None:
        """Raise SetupError if gradients of the first step differ where ranks hold the same parameters. Collective.

        Where no parameter is whole, compare the inputs of the model.

        A computation that is complete on each rank gives them the same gradient. If it is a part of a sum, as that of a
        norm of heads that are split, the ranks would train apart, and FSDP2 would not notice it.
        """
        if any(self._differ(self._inputs)):
            raise SetupError(
                "ranks that differ only in the dimensions of the mesh had different batches: give them the same, as "
                "run.loader does"
            )
        compared = [each for each in parameters if each in self._whole]
        for parameter, differs in zip(compared, self._differ([_sums(each.grad) for each in compared]), strict=True):
            if differs:
                raise SetupError(
                    f"the gradient of {self._whole[parameter]!r} differs between ranks that hold the same values of "
                    "it: they had different batches, or what parallelize= has made of the model leaves out a "
                    "reduction, such as a gradient of a norm whose inputs are split"
                )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._first_call.remove()
            leaves = [each for each in pytree.leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            self._inputs = [_sums(each) for each in leaves]

    def _differ(self, sums: list[torch.Tensor]) -> list[bool]:
        """Which of ``sums`` differ between ranks that have the same data. Collective."""
        if not sums:
            return []
        device = comm_device(torch.device("cpu"))
        own, all_sums, differs = self.mesh.own, torch.stack(sums).to(device), torch.zeros(len(sums), device=device)
        for number, name in enumerate(own.mesh_dim_names or ()):
            if name not in (CONTEXT, PIPELINE) and own.size(number) > 1:
                low, high = all_sums.clone(), all_sums.clone()
                dist.all_reduce(low, dist.ReduceOp.MIN, own.get_group(name))
                dist.all_reduce(high, dist.ReduceOp.MAX, own.get_group(name))
                differs += ((high - low) > _TOLERANCE * high[:, 1:]).any(dim=1)
        if not self._pipeline:  # whose stages have different parameters
            dist.all_reduce(differs)  # so that all ranks raise
        return [bool(count) for count in differs.tolist()]


def _check_samplers(parts: int) -> None:
    """Raise SetupError if a DistributedSampler gives data to more ranks than the data has ``parts``."""
    for each in gc.get_objects():
        if issubclass(type(each), DistributedSampler) and each.num_replicas > parts:
            raise SetupError(
                f"a DistributedSampler gives {each.num_replicas} ranks data of their own, and this mesh has {parts} "
                "groups of ranks that need the same: use run.loader"
            )


def _sums(gradient: torch.Tensor | None) -> torch.Tensor:
    """The sum and the sum of the absolute values of this rank's shard, in float64; of shape (2,)."""
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64)
    wide = local(gradient).to(torch.float64)
    return torch.stack([wide.sum(), wide.abs().sum()])
