"""DistributedOptimizer: it averages gradients over the ranks, for models that no wrapper does it for.

As Horovod's of the same name: gradients travel in buckets while the backward pass still runs, and `step` waits for
them. The buckets are the same on all ranks and leave in the same order, so a rank on which a parameter got no gradient
takes part with zeros, and none waits for ever. With each bucket travels one number per parameter that says whether
there was a gradient: one that no rank had stays None, as in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from flk_runtime.distributed import buckets
from flk_runtime.distributed.collectives import describe, unsendable
from flk_runtime.distributed.reducer import gradient_reducer
from flk_runtime.errors import SetupError


class DistributedOptimizer(Optimizer):
    """``optimizer`` that steps with the mean of all ranks' gradients; all else is the given optimizer's own.

    Made on all ranks, with the same parameters: SetupError names the first difference. It does not broadcast: start
    with equal parameters (`synchronize`). Learning rate schedulers and snapshots take it as they take the given one.

    ``named_parameters`` (model.named_parameters()) is for names in messages. ``collectives`` is "torch" or "horovod".
    ``backward_passes_per_step``: so many backward passes add up, and the last one sends; divide the losses by it.
    `no_sync` does the same for any number of passes.

    `step` first calls `synchronize`; call that yourself where something must see the mean before the step: clipping, or
    GradScaler.unscale_. A parameter without a gradient on this rank counts as zeros. Sparse gradients are a SetupError.
    """

    # GradScaler would leave scaling to a fused optimizer, by attributes that it would set on this object.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        *,
        collectives: str = "torch",
        backward_passes_per_step: int = 1,
        bucket_bytes: int = buckets.LIMIT,
    ) -> None:
        # Not Optimizer.__init__: groups, state and hooks are those of the given one, which __getattr__ finds.
        if not isinstance(optimizer, Optimizer):
            raise SetupError(f"DistributedOptimizer takes a torch optimizer, not a {type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise SetupError("the optimizer is a DistributedOptimizer already")
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise SetupError(
                f"backward_passes_per_step={backward_passes_per_step!r}: expected a whole number from 1 on"
            )
        self._optimizer = optimizer
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named_parameters or ()}
        self._passes, self._bucket_bytes = backward_passes_per_step, bucket_bytes
        self._reducer = gradient_reducer(collectives)
        self._buckets: list[_Bucket] = []
        self._counts: dict[torch.Tensor, int] = {}  # backward passes since the last step, of every parameter
        self._sent = 0  # how many of the buckets are on their way
        self._held = False
        self._averaged = False  # since the last step, by synchronize()
        if self._reducer.world_size > 1:
            self._compare()
            self._adopt()

    # What an optimizer is asked for

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self._optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """The given optimizer's."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the given optimizer."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the given optimizer's; on all ranks."""
        self._optimizer.add_param_group(param_group)
        self._adopt()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the given optimizer's. SetupError where gradients are on their way: they would come back."""
        if self._sent:
            raise SetupError(
                "zero_grad() between backward() and step(): gradients are on their way to the other ranks; "
                "to leave a step out, call synchronize() before"
            )
        self._begin()
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the mean gradients, then step. Collective. A closure's gradients are averaged each time it runs."""
        if closure is not None:
            return self._optimizer.step(partial(self._evaluated, closure))
        if not self._averaged:
            self.synchronize()
        self._averaged = False
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if "_optimizer" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DistributedOptimizer is neither copied nor pickled: keep its state_dict()")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r})"

    # Averaging

    def synchronize(self) -> None:
        """Put the mean over the ranks into all gradients. Collective; the next `step` then does not repeat it.

        Comes after the last backward pass of a step and outside `no_sync`.
        """
        if self._held:
            raise SetupError("synchronize() or step() within no_sync(): leave it before the last backward pass")
        if self._reducer.world_size > 1:
            self._adopt()
            while self._sent < len(self._buckets):
                self._send()
            for bucket in self._buckets:
                bucket.receive()
        self._begin()
        self._averaged = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add to this rank's gradients; those of the first pass after it are sent."""
        held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = held

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        self._averaged = False
        return loss

    def _begin(self) -> None:
        self._sent, self._averaged = 0, False
        self._counts = dict.fromkeys(self._counts, 0)
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def _adopt(self) -> None:
        """Take in the parameters that have come to require gradients: all at first, a new or thawed group's later."""
        if self._reducer.world_size == 1:
            return
        trained = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        # Gradients are ready in the reverse order, roughly.
        new = [parameter for parameter in trained if parameter not in self._counts][::-1]
        for parameter in new:
            if problem := unsendable(parameter):  # such as one that a wrapper has put into the optimizer since
                raise SetupError(f"DistributedOptimizer: {self._name(parameter)} is {problem}")
        for parameters in buckets.split(new, self._bucket_bytes):
            bucket = _Bucket(len(self._buckets), parameters)
            self._buckets.append(bucket)
            for parameter in parameters:
                self._counts[parameter] = 0
                hook = partial(_ready, weakref.ref(self), bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _ready(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        """A backward pass has added to this parameter's gradient."""
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise SetupError(f"{self._name(parameter)} has a sparse gradient, which is not averaged: use sparse=False")
        if self._averaged:
            raise SetupError("backward() between synchronize() and step(): its gradients would not be averaged")
        if self._held:
            return
        self._counts[parameter] += 1
        if self._counts[parameter] > self._passes:
            raise SetupError(
                f"{self._name(parameter)} was in {self._counts[parameter]} backward passes since the last step, and "
                f"backward_passes_per_step={self._passes}: raise it, or put all passes but the last into no_sync()"
            )
        if self._counts[parameter] == self._passes:
            bucket.waiting -= 1
        # In the order of the buckets, which is the same on all ranks; what a rank leaves out here synchronize() sends.
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            self._send()

    def _send(self) -> None:
        self._buckets[self._sent].send(self._reducer.start)
        self._sent += 1

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(parameter) or self._places()[parameter]

    def _places(self) -> dict[torch.Tensor, str]:
        return {
            parameter: f"parameter {place} of group {number}"
            for number, group in enumerate(self.param_groups)
            for place, parameter in enumerate(group["params"])
        }

    def _compare(self) -> None:
        """Raise SetupError on all ranks unless they have the same parameters, and such as can be averaged."""
        lines = [("backward_passes_per_step", str(self._passes)), ("bucket_bytes", str(self._bucket_bytes))]
        problems, places = [], self._places()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            problem = unsendable(parameter)
            name = self._names.get(parameter) or places[parameter]
            kind = f"{describe(parameter)}, {problem or ('trained' if parameter.requires_grad else 'frozen')}"
            lines.append((name, kind))
            if problem:
                problems.append(f"DistributedOptimizer: {name} is {kind}")
        self._reducer.check_consistent("DistributedOptimizer", lines)
        if problems:  # all ranks have the same
            raise SetupError(problems[0])


def _ready(owner: weakref.ref[DistributedOptimizer], bucket: _Bucket, parameter: torch.Tensor) -> None:
    """The hook of a parameter; it has nothing to do for an optimizer that was given up for another one."""
    if optimizer := owner():
        optimizer._ready(bucket, parameter)


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, number: int, parameters: list[torch.Tensor]) -> None:
        self.number = number
        self.parameters = parameters
        self.waiting = len(parameters)  # for the gradients of so many
        self._flat = torch.empty(0)
        self._wait: Callable[[], None] | None = None

    def send(self, start: Callable[[torch.Tensor, str], Callable[[], None]]) -> None:
        """Begin to average: the gradients' elements, then for each parameter whether it has a gradient."""
        like = self.parameters[0]
        present = like.new_ones(len(self.parameters), requires_grad=False)
        for place, one in enumerate(self.parameters):
            if one.grad is None:
                present[place] = 0  # filled where it lies: copying a list to a GPU would wait for it
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        self._flat = buckets.pack([*gradients, present])
        self._wait = start(self._flat, f"gradients-{self.number}")

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the mean, and put it into the gradients that any rank has."""
        assert self._wait is not None  # noqa: S101
        self._wait()
        count = len(self.parameters)
        missing = [place for place, one in enumerate(self.parameters) if one.grad is None]
        # Read only where it matters: on a GPU it means to wait for it.
        elsewhere = self._flat[-count:].real.tolist() if missing else []
        for place in missing:
            if elsewhere[place] > 0:
                self.parameters[place].grad = torch.zeros_like(self.parameters[place])
        parts = torch.split(self._flat[:-count], [one.numel() for one in self.parameters])
        for one, part in zip(self.parameters, parts, strict=True):
            if one.grad is not None:
                one.grad.copy_(part.view(one.shape))
        self._flat, self._wait = torch.empty(0), None
