"""StepStreams: orders work on a GPU with the optimizer steps around it, whatever streams the script uses."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from flk_runtime.system import device as devices


class StepStreams:
    """Notes on which streams optimizers of a model step, so that the host need not wait for work between two steps.

    The host waits where no step is noted: a script may change parameters by itself, or replay a step from a CUDA graph.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """``parameters`` are the model's. The steps of an optimizer that has none of them are not noted."""
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(parameters))
        self._streams: set[torch.cuda.Stream] = set()  # of the steps since the latest work
        self._done: torch.cuda.Event | None = None  # the latest work
        self._replays = False  # a step is in a CUDA graph, whose replays call no hooks
        before, after = _weak(self._begin_step), _weak(self._end_step)
        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            weakref.finalize(self, handle.remove)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Have the block see the steps before it, and the steps after it see what the block does."""
        if self._replays or not self._streams:
            with devices.across_streams():
                yield
            return
        current = torch.cuda.current_stream()
        for each in self._streams:
            current.wait_stream(each)
        self._streams.clear()
        yield
        self._done = current.record_event()

    def _begin_step(self, _: Optimizer) -> None:
        if self._done is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_event(self._done)

    def _end_step(self, optimizer: Optimizer) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        if torch.cuda.is_current_stream_capturing():
            self._replays = True
        elif any(each in self._parameters for group in optimizer.param_groups for each in group["params"]):
            self._streams.add(torch.cuda.current_stream())


def _weak(method: Callable[[Optimizer], None]) -> Callable[..., None]:
    """A hook that calls ``method`` as long as its object is there."""
    found = weakref.WeakMethod(method)

    def hook(optimizer: Optimizer, *_: Any) -> None:
        if own := found():
            own(optimizer)

    return hook
