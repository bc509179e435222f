"""DistributedOptimizer: an optimizer that averages gradients over the ranks, for models without a wrapper such as DDP.

Horovod and Lux.jl have one of this name. Hooks of the parameters average all gradients at the end of each backward pass
outside of `no_sync`. So what reads them before the step reads averages: clipping, and a GradScaler, which finds an
overflow of one rank on all. To average averages again changes nothing, so several passes may come before a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from flk_runtime.distributed.broadcast_state import check_alike
from flk_runtime.distributed.collectives import all_reduce, begin
from flk_runtime.distributed.consistency import parameters_in
from flk_runtime.errors import SetupError


class DistributedOptimizer(Optimizer):
    """Wraps ``optimizer``: `step` uses the mean of all ranks' gradients. Everything else is the wrapped optimizer's.

    Collective: made on all ranks with the same parameters; raises SetupError with the first difference. It does not
    broadcast: start from equal parameters (`synchronize`). Learning rate schedulers and checkpoints accept it.

    Each trained parameter needs a gradient, which is not sparse, on each rank in each pass outside of `no_sync`; else
    SetupError is raised at the step, or in the pass. `synchronize` averages gradients that the script has set itself.
    It is neither copied nor pickled: save its ``state_dict``.
    """

    # With a fused optimizer GradScaler would leave unscaling to it, by attributes set on this object.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Optimizer) -> None:
        # Optimizer.__init__ is not called: groups, state and hooks are the wrapped optimizer's, found by __getattr__.
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise SetupError(f"DistributedOptimizer takes an optimizer of torch, not a {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._hooked: set[torch.Tensor] = set()
        self._ready: set[torch.Tensor] = set()  # they have got a gradient since the latest averages
        self._trained = 0  # the number of parameters that the pass gives gradients
        self._is_held = self._has_averages = False  # in no_sync(); for the next step
        self._averages = begin("DistributedOptimizer")  # there are several ranks
        if self._averages:
            check_alike("DistributedOptimizer", optimizer)
        self._add_hooks()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the averages. Raises SetupError if there are none, and for a closure."""
        if closure is not None:
            raise SetupError("DistributedOptimizer.step takes no closure: compute the gradients before")
        self._check()
        return self._optimizer.step()

    def synchronize(self) -> None:
        """Replace all gradients by their mean. Collective. Raises SetupError where only some ranks have one."""
        all_reduce([parameter.grad for parameter in parameters_in(self)], "mean")
        self._ready.clear()
        self._has_averages = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sending them; the first backward pass after the block averages them too."""
        was_held, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = was_held

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)
        self._ready.clear()
        self._add_hooks()  # of parameters that the script has put into a group itself

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)
        self._add_hooks()

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    # Scripts set these two, as to begin anew with an empty state.
    @property
    def state(self) -> Any:
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self._optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DistributedOptimizer is neither copied nor pickled: save its state_dict()")

    def _add_hooks(self) -> None:
        note = weakref.WeakMethod(self._note)
        for parameter in parameters_in(self):
            can_train = parameter.is_floating_point() or parameter.is_complex()
            if self._averages and can_train and parameter not in self._hooked:
                self._hooked.add(parameter)
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # a frozen one takes no hook, and keeps it until it is unfrozen
                parameter.register_post_accumulate_grad_hook(lambda tensor: (found := note()) and found(tensor))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(is_trained)

    def _note(self, parameter: torch.Tensor) -> None:
        """A backward pass has given ``parameter`` its gradient: average all, if it is the last one."""
        if self._is_held:
            self._has_averages = False  # this rank's gradient is added to them
            return
        if parameter in self._ready:
            self._check()
        if not self._ready:  # the first of a pass
            self._trained = sum(parameter.requires_grad for parameter in parameters_in(self))
        self._ready.add(parameter)
        if len(self._ready) == self._trained:
            self.synchronize()

    def _check(self) -> None:
        """Raise SetupError unless the gradients are averages, which the step then uses."""
        has_averages, self._has_averages = self._has_averages, False
        trained = [parameter for parameter in parameters_in(self) if parameter.requires_grad]
        missing = [tuple(parameter.shape) for parameter in trained if self._ready and parameter not in self._ready]
        if self._averages and (missing or not has_averages):
            cause = f"a parameter of shape {missing[0]} had no gradient" if missing else "there was no backward pass"
            raise SetupError(
                f"DistributedOptimizer has averaged no gradients for this step, since {cause} outside of no_sync: call "
                "synchronize() for gradients that the script has set, freeze parameters that are not trained, or use "
                "run.parallelize, with find_unused_parameters=True where ranks use different parameters"
            )
