"""Loop: a training loop of the script's own, or of a framework, whose state flk keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn

from flk_runtime.checkpoint.adapters.adapt import adapt
from flk_runtime.checkpoint.adapters.wrappers import Parts, parameters_of, roots_of
from flk_runtime.checkpoint.stateful import Declared
from flk_runtime.data import EpochLoader, LoaderOptions
from flk_runtime.preflight.bootstrap import compare_options
from flk_runtime.shared.progress import Phase
from flk_runtime.training.context import RunContext
from flk_runtime.training.elastic import refuse_per_rank
from flk_runtime.training.step.first_pass import DRAWN, set_random_states_at_first_pass
from flk_runtime.training.training import Training

RESERVED_METRICS: Final = frozenset({"loss", "samples", "tokens", "report", "step"})
"""Names that a metric cannot have: arguments of `Loop.step`, and the number of the step in a line of metrics."""


class Loop(Training):
    """A training loop of the script's own. Made by `adopt`: what that was given is saved, and `step` ends each step.

    All ranks must call the methods marked "Collective.", in the same order.
    """

    def __init__(self, context: RunContext, objects: dict[str, Any], *, owns_group: bool) -> None:
        """Restore ``objects``, the state of the loop, by their names in checkpoints. Collective."""
        self._objects: dict[str, Any] = {}
        self.is_drawn_for: Callable[[], bool] = lambda: False
        """Whether a loader of another package has given the batch of a step, and calls `end_drawn_step` at the next."""
        adapted = self._adapted(objects)
        super().__init__(context, owns_group=owns_group, needs_model=False)
        self._register(adapted)
        if self.steps:
            drawn = DRAWN.format(call="flk.adopt", advice="call loop.restore_random_state() before the first batch")
            begin, say = self._saves.manager.begin_rank_rng, functools.partial(context.say, drawn)
            called = [part for each in self._objects.values() if isinstance(each, nn.Module) for part in roots_of(each)]
            context.closing.append(set_random_states_at_first_pass(called, begin, say))

    def register(self, **objects: Any) -> None:
        """Keep more objects, as `adopt` does, and restore them now. Call it before the first step. Collective.

        For objects that are made when it is known where the training resumes. Raises SetupError and CheckpointError as
        `adopt` does.
        """
        self._check_open("register")
        self._register(self._adapted(objects))

    def register_states(self, **states: Any) -> None:
        """Keep adapters of objects, and objects that are no modules and no optimizers, as `register` does. Collective.

        Also after the first step, where the checkpoint that was resumed does not have them.
        """
        self._check_open("register")
        self._register(states)

    def restore_random_state(self) -> None:
        """Set the random generators of this rank to their states in the checkpoint, until the first step.

        Call it before the first batch, and after a split of the data, where the script draws its batches itself by the
        global generators. Before a first attempt's first step it does nothing.
        """
        if self.steps:
            self._saves.manager.start_rank_rng()

    def begin_at(self, step: int) -> None:
        """Leave the checkpoint alone, because the script has restored another one, of this step. Collective."""
        self._saves.begin_at(step)
        self._steps.done = step

    def _adapted(self, objects: dict[str, Any]) -> dict[str, Any]:
        """The adapters of objects, by name. Raises SetupError if the ranks hold different ones. Collective."""
        objects = {name: _joined(thing) for name, thing in objects.items()}
        compare_options("adopt", _described(objects))
        self._objects |= objects
        adapted = {name: adapt(name, thing, self._objects) for name, thing in objects.items()}
        refuse_per_rank("adopt", adapted)
        return adapted

    def _register(self, adapted: dict[str, Any]) -> None:
        for name, thing in adapted.items():
            self._saves.manager.register(name, thing)

    @property
    def should_stop(self) -> bool:
        """Whether `step` will save and end this process after the step that is going on: a pod of the job must go.

        For a loop that has something to finish before, such as a log. It may become true on one rank before another, so
        no rank may skip a collective because of it.
        """
        return bool(self._context.page.hold)

    @property
    def has_storage(self) -> bool:
        """Whether checkpoints go to storage. Those in memory are lost with the last pod of the job."""
        return self._saves.manager.has_storage

    def loader(self, dataset: Any, batch_size: int | None = None, *, mesh: Any = None, **options: Any) -> EpochLoader:
        """A loader of this rank's batches, whose position is saved and restored, as `Run.loader`. Collective.

        ``mesh``: the dimension of the script's DeviceMesh along which the data is split, such as ``mesh["dp"]``. The
        ranks of one tensor, context or pipeline parallel group then get the same batches. By default the data is split
        over all ranks. Call it before the first step. With ``accumulate`` it gives `flk_runtime.data.MicroBatches`,
        whose ``parts`` are the micro-batches of a step.
        """
        of_flk = {key: options.pop(key) for key in LoaderOptions.__dataclass_fields__ if key in options}
        part = None if mesh is None else (int(mesh.get_local_rank()), int(mesh.size()))
        return self._batches.make_loader(dataset, LoaderOptions(batch_size, **of_flk, of_torch=options), part)

    def step(
        self,
        loss: torch.Tensor | float | None = None,
        *,
        samples: int = 0,
        tokens: int = 0,
        report: bool = False,
        **values: Any,
    ) -> None:
        """Count a step that the script's optimizer has made: call it after optimizer.step(). Collective.

        Every ``log_every`` steps, and if ``report``, a line of metrics is printed on rank 0, with the mean of ``loss``
        over the ranks that give one, and rank 0's ``values``; tensors have one element and are read only then.
        ``samples`` and ``tokens`` are the numbers in this step of all ranks together, for the throughput; a loader of
        `loader` counts its samples itself. Every ``save_every`` steps a checkpoint is written, here, so call it last in
        a step; with batches of `loader` where the step ends, as `Run.step` says. Raises CheckpointError as `save` does,
        and SetupError after `close`.

        After a pod has received SIGTERM, all ranks save after the same step, and raise SystemExit with code 143.
        """
        self._check_open("step")
        batches = self._batches
        own, draws = batches.take_samples()
        self._steps.record(
            loss,
            values,
            samples=own or samples,
            draws=draws or self.is_drawn_for(),
            tokens=tokens,
            epoch=batches.epoch,
            report=report,
        )

    def end_drawn_step(self) -> None:
        """A batch is about to be drawn, which ends the step before: it is saved if that is due. Collective."""
        self._steps.end_step()

    def evaluating(self) -> AbstractContextManager[None]:
        """A context for an evaluation, which may be silent for longer than a step, as a loop over `Run.evaluation`."""
        return self._context.page.during(Phase.EVALUATING)


def _joined(thing: Any) -> Any:
    """A list of modules as the parts of one model; any other object as it is."""
    is_list = isinstance(thing, list | tuple) and thing and all(isinstance(part, nn.Module) for part in thing)
    return Parts(thing) if is_list else thing


def _described(objects: dict[str, Any]) -> dict[str, str]:
    """The facts that all ranks must have alike: names and classes of the objects, names and shapes of parameters."""
    found: dict[str, str] = {}
    for name, thing in objects.items():
        found[name] = "per_rank" if isinstance(thing, Declared) and not thing.replicated else type(thing).__qualname__
        if isinstance(thing, nn.Module) and not isinstance(thing, Parts):
            found |= {f"{name}.{key}": str(tuple(parameter.shape)) for key, parameter in parameters_of(thing).items()}
    return found
