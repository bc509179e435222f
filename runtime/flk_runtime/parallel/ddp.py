"""Strategy ddp: every rank holds the whole model, in torch's DistributedDataParallel, which averages gradients."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from flk_runtime.distributed import is_alike, parameters_in, synchronize
from flk_runtime.errors import SetupError
from flk_runtime.parallel.ddp_calls import adapt_calls
from flk_runtime.parallel.model import UNAVERAGED, ParallelModel
from flk_runtime.system.bits import bit_sum


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
        adapt_calls(module)
        _Passes(module, self.trained())
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


class _Passes:
    """Refuses gradients that DDP does not average: it averages one backward pass after each of its calls."""

    def __init__(self, module: DistributedDataParallel, trained: Mapping[str, nn.Parameter]) -> None:
        self._module, self._trained = module, trained
        self._own = {id(each) for each in trained.values()}
        # Parameters that have got a gradient since the latest call; None: DDP was not ready.
        self._passed: set[str] | None = None
        self._has_passed = False  # a backward pass has reached a parameter
        self._has_averaged = False  # DDP has averaged a pass
        # For all optimizers: a pass in no_sync came after the latest that DDP has averaged, or a call before the first.
        self._may_differ = False
        # Since that pass: the optimizers that have made a step, and which of them have had a call in no_sync after it.
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._called: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        module.register_forward_pre_hook(self._call)
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(functools.partial(self._accumulated, name))  # type: ignore[no-untyped-call]
        found = weakref.WeakMethod(self._check)  # the hook stays for ever

        def check(optimizer: Optimizer, *_: Any) -> None:
            if own := found():
                own(optimizer)

        register_optimizer_step_pre_hook(check)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the optimizers, which do not train a copy; weak references cannot be pickled."""
        return {**vars(self), "_stepped": set(), "_called": set()}

    def _call(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            averages = self._module.require_backward_grad_sync
            self._passed = set() if averages else None
            if not averages and self._has_averaged:
                self._called |= self._stepped  # before the steps of others, one rank may make calls, as to log a loss
            elif not averages:
                self._may_differ = True

    def _accumulated(self, name: str, _: torch.Tensor) -> None:
        self._has_passed = True
        if self._passed is None or name in self._passed:
            if not self._module.require_backward_grad_sync:
                self._may_differ = True
                return
            raise SetupError(
                f"strategy ddp does not average this gradient of {name!r}: before each backward pass, call the module "
                "that parallelize returned, outside of no_sync"
            )
        if not self._passed:  # DDP averages what earlier passes have left, too
            self._has_averaged, self._may_differ = True, False
            self._stepped.clear()
            self._called.clear()
        self._passed.add(name)

    def _check(self, optimizer: Optimizer) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if self._has_passed and not in_backward:  # as in almost all steps
            self._refuse_unaveraged(optimizer)
            if self._passed and len(self._passed) < len(self._own) and not self._module.find_unused_parameters:
                self._refuse_lack(optimizer, self._passed)
            return
        own = self._gradients(optimizer)
        if own and in_backward:
            raise SetupError("strategy ddp averages gradients after hooks: call optimizer.step() after backward()")
        if not self._has_passed and any(each is not None and each.any() for each in own):
            raise SetupError(
                "strategy ddp averages the gradients of backward(), and the script has set them itself, as with "
                "torch.autograd.grad: call backward(), or use strategy none and average them with flk.all_reduce"
            )
        self._refuse_unaveraged(optimizer)  # other ranks may have made passes

    def _gradients(self, optimizer: Optimizer) -> list[torch.Tensor | None]:
        """The gradients of those parameters of the model that ``optimizer`` trains."""
        return [each.grad for each in parameters_in(optimizer) if id(each) in self._own]

    def _refuse_unaveraged(self, optimizer: Optimizer) -> None:
        """Raise SetupError on all ranks if gradients differ after a call or a pass in no_sync that DDP did not average.

        A script may have averaged them itself, and a gradient does not tell that. So the ranks compare them. Collective
        then. If DDP has averaged no pass since the step before, ranks have to make their calls in no_sync alike, and
        need not make the passes alike. Else they have to make the passes alike, and need not make the calls alike.
        """
        differs = self._may_differ or optimizer in self._called
        self._stepped.add(optimizer)
        if not differs or not (own := self._gradients(optimizer)):
            return
        sums = [bit_sum(each.to_dense()) for each in own if each is not None]
        if not is_alike([[each is None for each in own], torch.stack(sums).tolist() if sums else []]):
            raise SetupError(f"{UNAVERAGED}, or average them with flk.all_reduce before the step")

    def _refuse_lack(self, optimizer: Optimizer, passed: set[str]) -> None:
        """Raise SetupError if ``optimizer`` trains the model, since DDP has not averaged its latest gradients."""
        if self._own.isdisjoint(map(id, parameters_in(optimizer))):
            return
        name, lacking = next((name, each) for name, each in self._trained.items() if name not in passed)
        cause = "has had no gradient" if lacking.requires_grad else "was frozen, so it has no gradient,"
        raise SetupError(
            f"strategy ddp averages no gradients of this step, because {name!r} {cause} in the latest backward pass on "
            f"rank {dist.get_rank()}: pass find_unused_parameters=True to parallelize if that is meant"
        )


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
        module: Any = self._module
        names = state["names"]
        if module.find_unused_parameters or set(names) != self._trained.keys():
            return
        self._names = names
        self._finish()
        places = {id(self._trained[name]): place for place, name in enumerate(names)}
        found = zip(*module._build_params_for_reducer(), strict=True)  # parameters, and which gradients are sparse
        parameters, sparse = zip(*sorted(found, key=lambda each: places[id(each[0])]), strict=True)
        mapping = module._build_debug_param_to_name_mapping(parameters)
        # A reducer takes this order of its parameters for the one in which the gradients became ready.
        module._ddp_init_helper(list(parameters), list(sparse), mapping, static_graph=False)
        module.reducer._push_all_rebuilt_params()
        module._has_rebuilt_buckets = bool(module.reducer._rebuild_buckets())

    def _note(self, name: str, _: torch.Tensor) -> None:
        if self._module.require_backward_grad_sync:
            self._names.append(name)
            if len(self._names) == len(self._hooks):
                self._finish()

    def _finish(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
