"""Batches: the loaders of a run, and how its latest batch is divided."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from flk_runtime.data import EpochLoader, LoaderContext, StepShare, length_of, make_loader, share_of_worker, split
from flk_runtime.preflight.options import compare_options
from flk_runtime.run.context import RunContext
from flk_runtime.run.metrics import Metrics
from flk_runtime.run.saves import Saves
from flk_runtime.run.steps import Steps

T = TypeVar("T")


class Batches:
    """Makes loaders, and counts the samples that they give."""

    def __init__(self, context: RunContext, steps: Steps, saves: Saves, metrics: Metrics) -> None:
        self._context, self._steps, self._saves, self._metrics = context, steps, saves, metrics
        self._count = 0  # of loaders
        self._said_not_saved = False
        self._loader: EpochLoader | None = None  # the one that gave the latest batch
        self._samples = 0  # given by it since the latest step, to all ranks
        self._share: StepShare | None = None  # this rank's share of the latest batch
        self._fraction = 1.0  # of that batch that is in the current micro-batch

    def make_loader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool | None,
        split: bool,
        drop_last: bool,
        seed: int | None,
        name: str | None,
        options: dict[str, Any],
    ) -> EpochLoader:
        """A loader as `Run.loader` describes it. Collective."""
        # An evaluation may make a loader anew each time, and a resumed run has made another number of them.
        context, manager = self._context, self._saves.manager
        saved = name is not None or not self._steps.began
        name = name or ("loader" if self._count == 0 else f"loader-{self._count}")
        self._count += 1
        loader_context = LoaderContext(
            batch_size,
            context.rank,
            context.world_size,
            context.options.device,
            context.options.seed if seed is None else seed,
            name,
            steps_done=lambda: self._steps.done,
            on_begin=manager.start_rank_rng,
            on_batch=self._count_samples,
            on_end=lambda: self._saves.save_progress(self._steps.done),
            full_world_size=context.full_world_size if context.options.keep_batch else context.world_size,
        )
        shared = {"batch_size": batch_size, "shuffle": shuffle, "split": split, "drop_last": drop_last}
        if context.member.workers > 1 and split:
            dataset = share_of_worker(dataset, context.member.worker, context.member.workers)
        length = length_of(dataset) if split else None
        compare_options(f"loader {name!r}", shared | {"seed": loader_context.seed, "length of the dataset": length})
        loader = make_loader(dataset, loader_context, shuffle=shuffle, split=split, drop_last=drop_last, **options)
        if saved:
            manager.register(name, loader)
        elif not self._said_not_saved:
            self._said_not_saved = True
            context.say(
                f"{name!r} was made after the first step without a name=, so its position is not saved, as is right "
                "for an evaluation"
            )
        return loader

    @property
    def epoch(self) -> int | None:
        """The epoch of the loader that gave the latest batch; None if there was none."""
        return self._loader.epoch if self._loader else None

    @property
    def accumulation(self) -> int:
        """The number of micro-batches of the latest batch."""
        return self._share.pieces if self._share else 1

    def take_samples(self) -> int:
        """The number of samples that all ranks have got since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def micro_batches(self, batch: T, no_sync: Callable[[], AbstractContextManager[None]]) -> Iterator[T]:
        """The micro-batches of the latest ``batch``, all but the last one inside of ``no_sync``."""
        samples = self._share.given if self._share else 1
        for number, (part, fraction) in enumerate(split(batch, self.accumulation, samples), 1):
            self._fraction = fraction
            with contextlib.nullcontext() if number == self.accumulation else no_sync():
                yield part
        self._fraction = 1.0

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``, weighted by this rank's share of the global batch."""
        weight = self._share.weight(self._context.world_size, self._fraction) if self._share else 1.0
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]

    def _count_samples(self, loader: EpochLoader, share: StepShare) -> None:
        self._share, self._fraction = share, 1.0
        if loader is not self._loader:  # samples of an evaluation do not count for the next step
            self._loader, self._samples = loader, 0
        self._samples += share.samples
        self._metrics.shares.add_wait(loader.waited)
        loader.waited = 0.0
