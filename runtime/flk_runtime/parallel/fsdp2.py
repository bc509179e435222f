"""FSDP2: torch's fully_shard, which makes each parameter a DTensor whose rows are split over the ranks."""

from __future__ import annotations

import contextlib
import operator
import re
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from flk_runtime.checkpoint import reshard, roots_of, user_name
from flk_runtime.errors import SetupError
from flk_runtime.parallel.blocks import kept_units, sharded_units
from flk_runtime.parallel.full_parameters import watch_passes
from flk_runtime.parallel.gradients import SameUse, UnreducedGradients, extend_zero_grad
from flk_runtime.parallel.meta_init import Materializer
from flk_runtime.parallel.model import ParallelModel, full
from flk_runtime.parallel.options import ParallelOptions
from flk_runtime.parallel.precision import Precision
from flk_runtime.parallel.records import groups_of, sharded_parameters
from flk_runtime.parallel.silent_errors import LOST, refuse_module_saves, refuse_silent_errors
from flk_runtime.parallel.skipped import SkippedUnits
from flk_runtime.parallel.step_errors import explain_errors
from flk_runtime.parallel.unused import UnusedParameters
from flk_runtime.system import pytree

# By sharded model: of each parameter the class of its module, the module's table, the name there, and FSDP2's record.
_tables: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, dict[str, nn.Parameter | None], str, Any]]]
_tables = weakref.WeakKeyDictionary()


class FSDP2Model(ParallelModel):
    """A model whose blocks are sharded in place. The user calls the same object as before, or each of its parts."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        options: ParallelOptions,
        *,
        broadcast: bool,
        reshards: bool | int,
        init_follows: bool,
        resets: bool = True,
    ) -> None:
        """Shard ``model`` in place, each of ``blocks`` on its own. Collective.

        Unless ``options`` name the blocks, the embedding and the head are sharded on their own too. Each part of
        `Parts` is sharded as a model of its own.
        ``broadcast``: send rank 0's values to all ranks before.
        ``mesh`` has the dimension shard, or replicate and shard. ``reshards``: free a block's full parameters after its
        forward pass; a number of ranks keeps them sharded over so many until the backward pass. Parameters outside of
        blocks and of a head are kept, since the backward pass needs them first. ``init_follows``: the model's own
        initialization sets the tensors that modules do not set, and with ``resets`` they set theirs here.
        """
        precision, ends = options.precision, options.blocks is None
        # Memory that is locked for a GPU's copies, so that they go on beside the computation.
        policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.offload else OffloadPolicy()
        roots = roots_of(model)

        def shard(block: nn.Module) -> None:
            root = block in roots
            if block is model and not root:  # the parts together, which nobody calls
                return
            for each in block.parameters():  # fully_shard refuses others, such as those in channels_last
                if not each.is_contiguous():
                    each.data = each.data.contiguous()
            if precision:
                _cast_buffers(block, precision)
            fully_shard(
                block,
                mesh=mesh,
                reshard_after_forward=False if block in kept else reshards,
                mp_policy=_mixed_precision(precision, block, root) if precision else MixedPrecisionPolicy(),
                offload_policy=policy,
            )

        if precision:
            _cast_without_parameters(model, precision)
        units = [unit for root in roots for unit in sharded_units(root, blocks, precision, ends=ends)]
        kept = [unit for root in roots for unit in kept_units(root, units, ends=ends)]
        Materializer(model, [*units, *roots], device, init_follows=init_follows, resets=resets).run(
            shard, broadcast=broadcast
        )
        for unit in (*units, *roots):
            (_allow_views if unit in kept or not _gathers(unit) else _copy_views)(unit)
        super().__init__(model)
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for kind in {type(module) for module in self._fsdp_modules}:
            kind.__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
            refuse_module_saves(kind)
            extend_zero_grad(kind)
        for root in roots:
            _prepare(root, options.prefetch)
        replicates = "replicate" in (mesh.mesh_dim_names or ())
        self._replicas = mesh.get_group("replicate") if replicates else None
        self._keeps_full, self._communicates = not reshards, mesh.size() > 1
        refuse_silent_errors()
        for parameter in model.parameters():
            parameter.register_hook = _refuse_hook  # type: ignore[method-assign]
        self._tied: list[str] = []  # buffers that rank 0 sends
        self._syncs, self._sends = True, True  # gradients now; buffers at the next forward pass
        for root in roots if self._communicates else ():
            root.register_forward_pre_hook(self._send_buffers)
        self._unused: UnusedParameters | None = None
        if options.find_unused_parameters:
            for module in self._fsdp_modules:
                module.set_reduce_scatter_unused_params(True, recurse=False)
            self._unused = UnusedParameters(self._fsdp_modules, communicates=self._communicates)
        self._unreduced = UnreducedGradients(model)
        if self._communicates and mesh.size() == dist.get_world_size():
            _compare_use(model, self._fsdp_modules, may_differ=options.find_unused_parameters)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._set_communication(False)
        try:
            yield
        finally:
            self._set_communication(True)
            self._unreduced.may_exist = True

    def loose_buffers(self) -> dict[str, torch.Tensor]:
        if not self._communicates or self.mesh:  # ranks of a mesh may have parts of a buffer
            return {}
        return {name: each for name, each in self.model.named_buffers() if name not in self._tied and each.numel()}

    def tie_buffers(self, names: Iterable[str]) -> None:
        self._tied += names

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _send_buffers(self, *_: Any) -> None:
        """Send rank 0's buffers before those forward passes before which DDP does."""
        if self._sends:
            for name in self._tied:
                dist.broadcast(self.model.get_buffer(name), src=0)
        self._sends = self._syncs and torch.is_grad_enabled()

    def _set_communication(self, enabled: bool) -> None:
        self._syncs = enabled
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(enabled, recurse=False)
            if self._keeps_full:  # one all-gather then serves all passes
                module.set_reshard_after_backward(enabled, recurse=False)

    def replicas(self) -> dist.ProcessGroup | None:
        return self._replicas

    def attach(self, optimizer: Optimizer) -> None:
        explain_errors(optimizer)
        self._unreduced.watch(optimizer)
        # A forward pass after the last backward pass (an evaluation) leaves full parameters, at least of the outermost
        # module, which the optimizer step would not change.
        optimizer.register_step_pre_hook(lambda *_: self._free())
        optimizer.register_step_pre_hook(lambda *_: LOST.check())
        if self._unused:
            optimizer.register_step_pre_hook(lambda *_, unused=self._unused: unused.remove(optimizer))

    def _free(self) -> None:
        """Do what `reshard` does for the whole model, in each step, without a walk over all modules."""
        for module in self._fsdp_modules:
            module.reshard()

    def full_tensor(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return full(parameter.detach())

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        return _shard_like(parameter, full)


def _prepare(root: Any, prefetch: int | None) -> None:
    """Have calls of ``root``, which is sharded, train it, or be refused. Arguments as of `FSDP2Model`."""
    type(root).__call__ = _call
    _tables[root] = [
        (type(module).__name__.removeprefix("FSDP"), module._parameters, name, record)
        for record in sharded_parameters(root)
        for module, name in _places(record)
    ]
    root._get_fsdp_state()._lazy_init()  # so that a block may be called before the model
    # With this name, generate() of Transformers takes as many steps on each rank as on the others.
    root._is_fsdp_managed_module = True
    own: list[Any] = [each for each in root.modules() if isinstance(each, FSDPModule)]
    watch_passes(root, own)
    if prefetch:
        _prefetch(own, prefetch)


def _compare_use(model: nn.Module, modules: Sequence[Any], *, may_differ: bool) -> None:
    """Have ranks that share one mesh use the sharded ``modules`` of ``model``, and their parameters, alike.

    ``may_differ``: ranks may use other ones than other ranks.
    """
    if not may_differ:
        for number, module in enumerate(modules):
            for group in groups_of(module._get_fsdp_state()):
                SameUse(number, group, model)
    named = {user_name(model, name): each for name, each in model.named_modules() if each in modules}
    named.pop("", None)
    named = {name: each for name, each in named.items() if groups_of(each._get_fsdp_state())}  # that are gathered
    SkippedUnits(model, named, may_skip=may_differ)


def _refuse_copy(module: nn.Module, memo: Any) -> None:
    raise SetupError(
        f"a {type(module).__name__} is sharded and cannot be copied: use run.average() in place of AveragedModel, or "
        "copy the model before parallelize, and parallelize both"
    )


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.is_inference_mode_enabled():  # FSDP2 makes full parameters once, and could not train with those made here
        with torch.inference_mode(False), torch.no_grad():
            return _call(model, *args, **kwargs)
    _refuse_others(model)
    try:
        result = nn.Module.__call__(model, *args, **kwargs)
        if not torch.is_grad_enabled():  # no backward pass frees full parameters, whose changes would be lost
            reshard(model)
        return result
    except RuntimeError as error:
        if not (found := re.search(r"\S* got mixed torch\.Tensor and DTensor", str(error))):
            raise
        if moved := _moved(model):
            raise SetupError(
                f"the parameter {moved!r} has another place than when the model was sharded, as where a "
                "parametrization was removed, so nothing gathers it: do that before parallelize, or use strategy ddp "
                "without precision="
            ) from error
        raise SetupError(
            f"{type(model).__name__.removeprefix('FSDP')} uses a parameter of a block without calling the block: "
            f"{found[0]}; leave it out of the blocks, as in parallelize(…, blocks='layers.*')"
        ) from error


def _moved(model: nn.Module) -> str:
    """The name of a sharded parameter of ``model`` in a place that FSDP2 does not know; empty if there is none."""
    known = {place for record in sharded_parameters(model) for place in _places(record)}
    for path, module in model.named_modules():
        for name, each in module._parameters.items():
            if isinstance(each, DTensor) and (module, name) not in known:
                return user_name(model, f"{path}.{name}".lstrip("."))
    return ""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_others(model: nn.Module) -> None:
    """Raise SetupError if other tensors are in the place of parameters of ``model``: FSDP2 would use its own."""
    LOST.check()
    table = _tables.get(model, ())  # none: a block of the same class
    now = [parameters.get(name) for _, parameters, name, _ in table]
    if all(map(operator.is_, now, [record.sharded_param for *_, record in table])):
        return
    for each, (kind, _, name, record) in zip(now, table, strict=True):
        if each is record.sharded_param or each is getattr(record, "_unsharded_param", record):
            continue
        if each is not None and each is getattr(record, "_sharded_post_forward_param", None):
            continue
        if each is None or isinstance(each, nn.Parameter):
            if each is None or not hasattr(each, "to_local") or hasattr(record, "_unsharded_param"):
                raise SetupError(
                    f"the parameter {name!r} of a {kind} has been replaced or removed, and a sharded model would keep "
                    "its own: do that before parallelize, or use strategy ddp without precision="
                )
        else:
            raise SetupError(
                f"another tensor is in the place of the parameter {name!r} of a {kind}, as torch.func."
                "functional_call puts it, and a sharded model would ignore it: use strategy ddp without precision="
            )


def _places(record: Any) -> list[tuple[nn.Module, str]]:
    """The modules that have the parameter of one of FSDP2's records, with its name in each."""
    info = record._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def _refuse_hook(*_: Any) -> None:
    raise SetupError(
        "register_hook of a sharded parameter would have no effect: use register_post_accumulate_grad_hook"
    )


def _gathers(unit: Any) -> bool:
    """Whether a unit has parameters of its own, which are in no unit inside of it."""
    return bool(groups_of(unit._get_fsdp_state()))


def _copy_views(unit: Any) -> None:
    """Copy outputs that are views: FSDP2 cannot gather the unit again if one is changed in place, as in ``y += x``."""
    for group in groups_of(unit._get_fsdp_state()):
        plain = group.post_forward

        def copied(module: nn.Module, arguments: Any, output: Any, plain: Any = plain) -> Any:
            if _has_views(output):
                output = pytree.map_leaves(output, lambda leaf: leaf.clone() if _is_view(leaf) else leaf)
            return plain(module, arguments, output)

        group.post_forward = copied


def _has_views(output: Any) -> bool:
    return _is_view(output) if isinstance(output, torch.Tensor) else any(map(_is_view, pytree.leaves(output)))


def _is_view(leaf: Any) -> bool:
    """Whether this is a tensor with a gradient that is a view of another one."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._is_view()


def _allow_views(unit: Any) -> None:
    """Silence the warning that changes of an output in place lose its gathering, where a unit is gathered no more."""
    state = unit._get_fsdp_state()
    plain = state._register_pre_backward_hook

    def quiet(output: Any) -> Any:
        if not _has_views(output):
            return plain(output)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")
            return plain(output)

    state._register_pre_backward_hook = quiet


def _prefetch(units: Sequence[FSDPModule], count: int) -> None:
    """Have each of ``units``, the model first, gather the ``count`` that follow it in a pass."""
    blocks = list(units[1:])
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(blocks[place : place + count])
        last = place - 1 if place else len(blocks)  # of the blocks before it in the forward pass
        unit.set_modules_to_backward_prefetch(blocks[max(0, last - count) : last][::-1])


def _mixed_precision(precision: Precision, block: nn.Module, root: bool) -> MixedPrecisionPolicy:
    """The dtypes of a block. Outputs that it computes in float32 stay float32, such as a loss of its router."""
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype(block),
        reduce_dtype=precision.reduce,
        output_dtype=precision.output_dtype(block, root=root),
        cast_forward_inputs=True,
    )


def _cast_buffers(block: nn.Module, precision: Precision) -> None:
    for module in block.modules():
        dtype = torch.float32 if precision.computes_in_float32(module) else precision.buffer
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _cast_without_parameters(model: nn.Module, precision: Precision) -> None:
    """Have modules without parameters compute in float32 if they are to: fully_shard casts for those with some."""
    for each in model.modules():
        if precision.computes_in_float32(each) and next(each.parameters(), None) is None:
            _cast_calls(each, precision)


def _cast_calls(module: nn.Module, precision: Precision) -> None:
    """Have ``module`` compute in float32, as fully_shard does for one with parameters."""

    def cast(tree: Any, dtype: torch.dtype) -> Any:
        return pytree.map_leaves(
            tree, lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        )

    module.register_forward_pre_hook(lambda module, args, kwargs: cast((args, kwargs), torch.float32), with_kwargs=True)
    module.register_forward_hook(lambda module, args, output: cast(output, precision.param))


def _shard_like(like: Any, full: torch.Tensor) -> torch.Tensor:
    """``full``, which every rank has, as a DTensor sharded as ``like`` is; without communication."""
    replicated = DTensor.from_local(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    shard: torch.Tensor = replicated.redistribute(placements=like.placements)
    return shard.to(like.device, copy=True)  # not a view, which would keep all of ``full`` alive
