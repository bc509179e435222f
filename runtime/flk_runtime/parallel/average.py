"""Average: an exponential moving average of the parameters of a model, which may be sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from flk_runtime.checkpoint import DistributedStateful, Parts, SplitState, chunks_of, is_sharded
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError, SetupError
from flk_runtime.parallel.model import ParallelModel, local
from flk_runtime.parallel.step_streams import StepStreams
from flk_runtime.system import device as devices

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject


class Average(DistributedStateful):
    """An exponential moving average of the trained parameters of a model. Made by `Run.average`.

    The values equal torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn: the first update copies the
    parameters, and each later one keeps a share ``decay`` of the average. Each rank averages its own shards, without
    communication. Buffers are not averaged.
    """

    def __init__(self, parallel: ParallelModel, decay: float) -> None:
        """Raises SetupError if ``decay`` is not between 0 and 1, or FSDP1 has flattened the parameters."""
        if not 0 <= decay <= 1:
            raise SetupError(f"decay={decay!r}: expected a number from 0 to 1")
        if not parallel.named:
            raise SetupError("an average needs the parameters of the model, which FSDP1 flattens: use FSDP2")
        if isinstance(parallel.saved, Parts):
            raise SetupError("an average needs the whole model, and each rank has a stage of a pipeline: leave it out")
        self._parallel, self._decay = parallel, decay
        self._updates, self._is_applied = 0, False
        self._streams = StepStreams(parallel.parameters().values())
        self._averages = {name: each.detach().clone() for name, each in parallel.trained().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the parameters to the average. Call it after optimizer.step(). Raises SetupError inside `applied`."""
        if self._is_applied:
            raise SetupError("update of an average that is applied: leave the block of applied() before")
        named = self._parallel.parameters()  # once, since it looks at all modules
        known = {id(named[name]) for name in self._averages}
        if new := next((name for name, each in named.items() if each.requires_grad and id(each) not in known), ""):
            raise SetupError(
                f"{new!r} was frozen when the average was made, so the average lacks it: call run.average while all "
                "parameters that are trained later require gradients, and freeze them after it"
            )
        averages, parameters = zip(*self._pairs(named), strict=True)
        with self._streams.between_steps():
            if self._updates:
                torch._foreach_lerp_(averages, parameters, 1 - self._decay)
            else:
                torch._foreach_copy_(averages, parameters)
        self._updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In the block the model has the averages as its parameters, for an evaluation. Train and save outside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def save_state(self, name: str) -> SplitState:
        if self._is_applied:
            raise MismatchError("cannot save while an average is applied: leave the block of applied() before")
        offered = [
            (key, value) for key, value in self._averages.items() if is_sharded(value) or process_group.rank() == 0
        ]
        chunks = [chunk for key, value in offered for chunk in chunks_of((name, "parameters", key), value)]
        return SplitState(chunks, {"updates": self._updates})

    def load_state(self, saved: SavedObject) -> None:
        names = {str(path[2]) for _, path in saved.checkpoint.names((saved.name, "parameters"))}
        if unexpected := sorted(names - self._averages.keys()):
            raise ValueError(f"unexpected average of {unexpected[0]!r}: the model does not train it")
        paths = {key: (saved.name, "parameters", key) for key in self._averages}
        saved.checkpoint.read([chunk for key, path in paths.items() for chunk in chunks_of(path, self._averages[key])])
        self._updates = saved.plain["updates"]

    @torch.no_grad()
    def _swap(self) -> None:
        with devices.across_streams():
            for average, parameter in self._pairs(self._parallel.parameters()):
                before = parameter.clone()
                parameter.copy_(average)
                average.copy_(before)
        self._is_applied = not self._is_applied

    def _pairs(self, named: Mapping[str, nn.Parameter]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's share of each average and of its parameter."""
        return [(local(average), local(named[name])) for name, average in self._averages.items()]
