"""DistributedOptimizer: an optimizer that averages gradients over the ranks, for models without a wrapper such as DDP.

It works as Horovod's of the same name; Lux.jl's DistributedUtils has one too. Gradients are sent in buckets while the
backward pass still runs, and `step` waits for them. The buckets are the same on all ranks and are sent in the same
order; a rank on which a parameter has no gradient sends zeros, so no rank waits for ever. Each bucket carries one
number per parameter that says whether there was a gradient: a gradient that no rank has stays None, as in one process.

torch's GradScaler divides the gradients by the loss scale before it calls the optimizer's step, and has no hook there.
So its `unscale_`, which its `step` calls too, is replaced by one that waits for the averages first. An overflow on one
rank is then in the averages of all, and all skip the step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from flk_runtime.distributed import buckets
from flk_runtime.distributed.collectives import describe, unsendable
from flk_runtime.distributed.process_group import mean_loss
from flk_runtime.distributed.reducer import gradient_reducer
from flk_runtime.errors import SetupError

_made: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


def averages(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a DistributedOptimizer averages the gradient of one of ``parameters`` over several ranks."""
    return any(each in optimizer._counts for optimizer in _made for each in parameters)


class DistributedOptimizer(Optimizer):
    """Wraps ``optimizer``: `step` uses the mean of all ranks' gradients. Everything else is the wrapped optimizer's.

    Collective: made on all ranks with the same parameters; raises SetupError with the first difference. It does not
    broadcast: start from equal parameters (`synchronize`). Learning rate schedulers and checkpoints accept it.

    ``named_parameters`` (model.named_parameters()) gives names for messages. ``collectives`` is "torch" or "horovod".
    ``backward_passes_per_step`` is how many backward passes accumulate before gradients are sent; divide the losses by
    it. `no_sync` does the same for any number of passes. ``bucket_bytes`` is the size of a bucket in bytes.

    `step` calls `synchronize` first, and so do the unscale_ and step of a GradScaler; call it yourself if something
    else needs the mean before the step, such as clipping. A parameter without a gradient on this rank counts as zeros.
    A sparse gradient raises SetupError.
    """

    # With a fused optimizer GradScaler would leave unscaling to it, by attributes set on this object.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        *,
        collectives: str = "torch",
        backward_passes_per_step: int = 1,
        bucket_bytes: int = buckets.BUCKET_BYTES,
    ) -> None:
        # Optimizer.__init__ is not called: groups, state and hooks are the wrapped optimizer's, found by __getattr__.
        if not isinstance(optimizer, Optimizer):
            raise SetupError(f"DistributedOptimizer takes a torch optimizer, not a {type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise SetupError("the optimizer is already a DistributedOptimizer")
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise SetupError(
                f"backward_passes_per_step={backward_passes_per_step!r}: expected a whole number, 1 or more"
            )
        self._optimizer = optimizer
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named_parameters or ()}
        self._passes, self._bucket_bytes = backward_passes_per_step, bucket_bytes
        self._reducer = gradient_reducer(collectives)
        self._buckets: list[_Bucket] = []
        self._counts: dict[torch.Tensor, int] = {}  # backward passes since the last step, of every parameter
        self._sent = 0  # number of buckets that are being averaged
        self._held = False  # in no_sync()
        self._averaged = False  # synchronize() was called since the last step
        _watch_grad_scalers()
        _made.add(self)
        if self._reducer.world_size > 1:
            self._compare()
            self._add_parameters()

    # The interface of an optimizer

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
        """The state of the wrapped optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; on all ranks."""
        self._optimizer.add_param_group(param_group)
        self._add_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Raises SetupError while gradients are being averaged, which would set them again."""
        if self._sent:
            raise SetupError(
                "zero_grad() between backward() and step(): gradients are being averaged; to skip a step, call "
                "synchronize() before"
            )
        self._reset()
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the averaged gradients, then step. Collective. With a closure, each call of it is averaged."""
        if closure is not None:
            return self._optimizer.step(functools.partial(self._evaluated, closure))
        self.average()
        self._averaged = False
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if "_optimizer" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DistributedOptimizer cannot be copied or pickled: save its state_dict()")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r})"

    # Averaging

    def synchronize(self) -> None:
        """Replace all gradients by their mean over the ranks. Collective; the next `step` does not repeat it.

        Call it after the last backward pass of a step. Raises SetupError inside `no_sync`. Horovod's method has the
        same name.
        """
        if self._held:
            raise SetupError("synchronize() or step() inside no_sync(): leave no_sync() before the last backward pass")
        if self._reducer.world_size > 1:
            self._add_parameters()
            while self._sent < len(self._buckets):
                self._send()
            for bucket in self._buckets:
                bucket.receive()
        self._reset()
        self._averaged = True

    def average(self) -> None:
        """Call `synchronize`, unless it was called since the last step. Collective."""
        if not self._averaged:
            self.synchronize()

    def end_step(self) -> None:
        """End a step that a GradScaler has skipped: the next backward pass is one of another step."""
        self._reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sending them; the first backward pass after the block sends them."""
        held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = held

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = mean_loss(closure) if self._reducer.world_size > 1 else closure()
        self.synchronize()
        self._averaged = False
        return loss

    def _reset(self) -> None:
        self._sent, self._averaged = 0, False
        self._counts = dict.fromkeys(self._counts, 0)
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def _add_parameters(self) -> None:
        """Put parameters that require gradients into buckets: all at first, later a new or unfrozen group's."""
        if self._reducer.world_size == 1:
            return
        trained = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        # Gradients become ready roughly in reverse order.
        new = [parameter for parameter in trained if parameter not in self._counts][::-1]
        for parameter in new:
            if problem := unsendable(parameter):  # such as one that a wrapper put into the optimizer later
                raise SetupError(f"DistributedOptimizer: {self._name(parameter)} is {problem}")
        for parameters in buckets.split(new, self._bucket_bytes):
            bucket = _Bucket(len(self._buckets), parameters)
            self._buckets.append(bucket)
            for parameter in parameters:
                self._counts[parameter] = 0
                hook = functools.partial(_ready, weakref.ref(self), bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _ready(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        """Called when a backward pass has accumulated this parameter's gradient: send the buckets that are complete."""
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise SetupError(
                f"{self._name(parameter)} has a sparse gradient, which cannot be averaged: use sparse=False"
            )
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
        # In the order of the buckets, which is the same on all ranks; synchronize() sends the buckets that are left.
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            self._send()

    def _send(self) -> None:
        self._buckets[self._sent].send(self._reducer.start)
        self._sent += 1

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(parameter) or self._positions()[parameter]

    def _positions(self) -> dict[torch.Tensor, str]:
        return {
            parameter: f"parameter {position} of group {number}"
            for number, group in enumerate(self.param_groups)
            for position, parameter in enumerate(group["params"])
        }

    def _compare(self) -> None:
        """Raise SetupError on all ranks unless they have the same parameters, which can be averaged."""
        lines = [("backward_passes_per_step", str(self._passes)), ("bucket_bytes", str(self._bucket_bytes))]
        problems, positions = [], self._positions()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            problem = unsendable(parameter)
            name = self._names.get(parameter) or positions[parameter]
            kind = f"{describe(parameter)}, {problem or ('trained' if parameter.requires_grad else 'frozen')}"
            lines.append((name, kind))
            if problem:
                problems.append(f"DistributedOptimizer: {name} is {kind}")
        self._reducer.check_consistent("DistributedOptimizer", lines)
        if problems:  # the same on all ranks
            raise SetupError(problems[0])


@functools.cache
def _watch_grad_scalers() -> None:
    """Have every GradScaler average before it unscales. A second call does nothing."""
    unscale, step = GradScaler.unscale_, GradScaler.step

    def is_averaging(optimizer: Any) -> bool:  # a DistributedOptimizer, or a wrapper that passes its methods on
        return hasattr(optimizer, "average") and hasattr(optimizer, "end_step")

    @functools.wraps(unscale)
    def unscale_averages(self: GradScaler, optimizer: Any) -> None:
        if is_averaging(optimizer):
            optimizer.average()
        unscale(self, optimizer)

    @functools.wraps(step)
    def step_or_skip(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, optimizer, *args, **kwargs)
        if is_averaging(optimizer):
            optimizer.end_step()
        return result

    GradScaler.unscale_, GradScaler.step = unscale_averages, step_or_skip  # type: ignore[method-assign]


def _ready(owner: weakref.ref[DistributedOptimizer], bucket: _Bucket, parameter: torch.Tensor) -> None:
    """The hook of a parameter; does nothing once the optimizer has been garbage collected."""
    if optimizer := owner():
        optimizer._ready(bucket, parameter)


class _Bucket:
    """Parameters whose gradients are averaged as one flat tensor."""

    def __init__(self, number: int, parameters: list[torch.Tensor]) -> None:
        self.number = number
        self.parameters = parameters
        self.waiting = len(parameters)  # number of gradients that are not ready
        self._flat = torch.empty(0)
        self._wait: Callable[[], None] | None = None

    def send(self, start: Callable[[torch.Tensor, str], Callable[[], None]]) -> None:
        """Start to average one flat tensor: all gradients, then for each parameter 1 if it has a gradient, else 0."""
        like = self.parameters[0]
        present = like.new_ones(len(self.parameters), requires_grad=False)
        for position, one in enumerate(self.parameters):
            if one.grad is None:
                present[position] = 0  # on the device: copying a list to a GPU would wait for it
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        self._flat = buckets.pack([*gradients, present])
        self._wait = start(self._flat, f"gradients-{self.number}")

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the mean, and copy it into the gradients that any rank has."""
        assert self._wait is not None  # noqa: S101
        self._wait()
        count = len(self.parameters)
        missing = [position for position, one in enumerate(self.parameters) if one.grad is None]
        # Read only if needed: on a GPU this waits for the device.
        elsewhere = self._flat[-count:].real.tolist() if missing else []
        for position in missing:
            if elsewhere[position] > 0:
                self.parameters[position].grad = torch.zeros_like(self.parameters[position])
        parts = torch.split(self._flat[:-count], [one.numel() for one in self.parameters])
        for one, part in zip(self.parameters, parts, strict=True):
            if one.grad is not None:
                one.grad.copy_(part.view(one.shape))
        self._flat, self._wait = torch.empty(0), None
