"""Batches: the loaders of a run, and how its latest batch is divided."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from flk_runtime.contract import user_env
from flk_runtime.data import (
    EpochLoader,
    EvaluationLoader,
    LoaderContext,
    LoaderEvents,
    LoaderOptions,
    StepShare,
    compare_orders,
    count_shards,
    describe_data,
    is_stream,
    length_of,
    make_loader,
    share_of_worker,
    sources_of,
)
from flk_runtime.distributed import find_difference, process_group
from flk_runtime.errors import SetupError, setting
from flk_runtime.preflight.bootstrap import compare_options, compares
from flk_runtime.system import rng
from flk_runtime.system.bits import is_compared
from flk_runtime.training.context import RunContext
from flk_runtime.training.lines import Metrics
from flk_runtime.training.saves import Saves
from flk_runtime.training.step.steps import Steps

T = TypeVar("T")
_LOOP: Final = "loop over its epochs(n) or steps(n)"


class Batches(LoaderEvents):
    """Makes loaders, and counts the samples that they give."""

    counts_steps = True

    def __init__(self, context: RunContext, steps: Steps, saves: Saves, metrics: Metrics) -> None:
        self._context, self._steps, self._saves, self._metrics = context, steps, saves, metrics
        self._count = 0  # of loaders
        self.parts = context.world_size
        """The number of parts of the data: of ranks that get different batches."""
        self._loader: EpochLoader | None = None  # it gave the latest batch
        self._samples = 0  # given by it since the latest step, to all ranks
        self.latest = StepShare(context.world_size, 1, 1)
        """This rank's share of the step of the latest batch of the training; without one, all ranks count alike."""
        # Of the loaders that have been read since the last step, except for evaluations: without gradients.
        self._in_use: dict[EpochLoader, StepShare] = {}
        self._step_ended = False  # since the latest batch
        self._unused: Counter[EpochLoader] = Counter()  # batches given since the latest backward pass
        self._given: set[EpochLoader] = set()  # loaders with a batch since the latest step
        self.draws = False
        """Whether one of them has given it outside of torch.no_grad(), in the thread of the training."""
        self._begun: set[EpochLoader] = set()  # whose iterations go on with the random states that were set last
        self._gone_on: set[EpochLoader] = set()  # of which a line has said so
        # Loaders with a batch before a backward pass since the latest step; None: no pass has been seen.
        self._used: set[EpochLoader] | None = None
        self._used_before: list[EpochLoader] = []  # the loaders of the latest step that had any
        self._ending: list[EpochLoader] = []  # their next batches end the step that is open
        self._draws_apart = False  # no loader has given a batch to all ranks, in the latest step that they compared
        self._steps_taken = 0  # in this attempt
        self._thread = threading.get_ident()  # of the training

    def make_loader(self, dataset: Any, options: LoaderOptions, part: tuple[int, int] | None = None) -> EpochLoader:
        """A loader as `Run.loader` describes it, of one of several parts of the data. Collective.

        ``part``: this rank's number and how many parts there are. By default each rank has one.
        """
        # An evaluation may make a loader anew each time, and a resumed run has made another number of them.
        context, manager = self._context, self._saves.manager
        saved = options.name is not None or not self._steps.began
        name = options.name or ("loader" if self._count == 0 else f"loader-{self._count}")
        if options.name and isinstance(manager.get(name), EpochLoader):
            raise SetupError(f"a loader named {name!r} was made before: make it once, and {_LOOP}")
        # Two loaders of the same data have different orders, as two of torch's. One that an evaluation makes anew has
        # the same each time, since a resumed run has made another number of them.
        seed = rng.derive_seed("loader", context.options.seed, name) if self._count and saved else context.options.seed
        self._count += 1
        number, parts = part or (context.rank, self.parts)
        full = context.full_world_size * parts // context.world_size if context.options.keep_batch else parts
        if options.batch_size is None:
            full *= setting(user_env.STANDS_FOR)  # one process has the batches of all these ranks
        loader_context = LoaderContext(
            options,
            number,
            parts,
            context.options.device,
            seed if options.seed is None else options.seed,
            name,
            events=self,
            full_world_size=full if part is None else parts,
        )
        if context.workers > 1:
            if any(options.of_torch.get(key) is not None for key in ("sampler", "batch_sampler")):
                raise SetupError(
                    f"{name!r}: a sampler chooses from all data, of which each worker of strategy diloco has a part: "
                    "leave it out, or pass a dataset of what it chooses"
                )
            dataset = share_of_worker(dataset, context.worker, context.workers)
        shared = {"shuffle": options.shuffle, "drop_last": options.drop_last, "accumulate": options.accumulate}
        _compare(f"loader {name!r}", dataset, options, shared | {"seed": loader_context.seed})
        loader = make_loader(dataset, loader_context)
        loader.is_saved = saved
        if saved:
            manager.register(name, loader)
        return loader

    def make_evaluation(self, dataset: Any, options: LoaderOptions) -> EvaluationLoader:
        """A loader as `Run.evaluation` describes it. Collective."""
        context = self._context
        loader_context = LoaderContext(
            options, context.rank, self.parts, context.options.device, context.options.seed, "evaluation"
        )
        _compare("evaluation", dataset, options, {})
        return EvaluationLoader(dataset, loader_context)

    def epoch(self) -> int | None:
        """The epoch of the loader that gave the latest batch; None if there was none."""
        return self._loader.epoch if self._loader else None

    def take_samples(self) -> tuple[int, bool]:
        """The samples that all ranks have got since the last call, which counts a step, and whether its end is a draw.

        Raises SetupError if they are of a loader whose position a restart would not find, or give to another one.
        """
        used = [loader for loader in self._in_use if self._used is None or loader in self._used]
        # A loader beside another one in a single step has given a batch to look at, as for a log.
        for loader in [loader for loader in used if len(used) == 1 or loader in self._used_before]:
            if not loader.is_saved and self._saves.manager.can_save:
                raise SetupError(
                    f"{loader.name!r} was made after the first step without a name=, so its position is not saved, and "
                    f"this step trains with it: make one loader before the first step, and {_LOOP}; pass a name= if it "
                    "is for another phase of the training, and read it in torch.no_grad() if it is for an evaluation"
                )
            loader.is_trained = True
        for loader in self._given:
            if loader.count_step():
                raise SetupError(
                    f"{loader.name!r} gives batches of two loops over it to each step, and both have the same order: "
                    "make a loader for each, with a seed= of its own"
                )
        self._given.clear()
        draws, self.draws = self._choose_ending(used) and self.draws, False
        self._used_before, self._used = used or self._used_before, None
        samples, self._samples, self._step_ended = self._samples, 0, True
        return samples, draws

    def _choose_ending(self, used: list[EpochLoader]) -> bool:
        """Choose the loaders that all ranks train with, and return whether their next draws may end this step.

        Of those in use, a single rank may have looked at others, or draw alone what it sends to other ranks. Now and
        then the ranks compare them, and the orders that samplers have given: after the same steps on all ranks,
        whatever each has looked at.
        """
        looping = [loader for loader in used if loader.is_in_loop] or used
        trained = [loader for loader in looping if loader in self._ending] or looping
        self._steps_taken += 1
        if self._count and self._context.world_size > 1 and is_compared(self._steps_taken):
            of_ranks = process_group.all_gather({loader.name: loader.mark for loader in trained})
            compare_orders(of_ranks)
            trained = [loader for loader in trained if all(loader.name in names for names in of_ranks)]
            self._draws_apart = not trained and any(of_ranks)
        self._ending = list({*self._ending, *trained}) if self._steps.is_open else trained
        return not self._draws_apart

    def say_if_data_begin_anew(self) -> None:
        """Before the first step after a restart, say if the script reads its data without a loader that is saved."""
        manager = self._saves.manager
        if manager.source in ("memory", "storage") and not self._given and not manager.keeps_iterable:
            self._context.say(
                "no loader of run.loader has given a batch to the first step after the restart: the position in the "
                "script's own data is in no checkpoint, and they begin where the script begins them"
            )

    def weight(self) -> float:
        """The factor of the mean loss of the latest batch. Raises SetupError if loaders give batches that differ."""
        return self._only(lambda share: share.weight(self.parts))

    def counts(self) -> bool:
        """Whether the samples of the latest batch count for this rank. Raises SetupError as `weight` does."""
        return self._only(lambda share: share.own > 0)

    def _only(self, read: Callable[[StepShare], T]) -> T:
        """The value that ``read`` returns for the shares of all batches in use."""
        values = {read(share) for share in self._in_use.values() or [self.latest]}
        if len(values) > 1:
            names = ", ".join(f"{loader.name} {share.samples}" for loader, share in self._in_use.items())
            raise SetupError(
                f"the loaders of this step give it different numbers of samples ({names}): make them with "
                "accumulate=1, take a loop over run.micro_batches for the batch of each, and call run.backward in it"
            )
        return values.pop()

    def steps_done(self) -> int:
        return self._steps.done

    def begin_steps(self, count: int) -> None:
        if self._is_in_training():
            self._steps.tell_total(count)

    def begin(self, loader: EpochLoader) -> None:
        if not self._begun or loader in self._begun:  # else it is read beside another one, which has drawn numbers
            self._begun.clear()
            self._saves.manager.start_rank_rng()
        if torch.is_grad_enabled():  # without gradients it is for an evaluation
            self._begun.add(loader)

    def draw(self, loader: EpochLoader, *, goes_on: bool) -> None:
        if self._steps.is_open and goes_on and loader in self._ending:
            self.end_step()

    def end_step(self) -> None:
        if self._is_in_training():
            self._steps.end_step()

    def _is_in_training(self) -> bool:
        """Without gradients a batch is for an evaluation, and a thread of its own is ahead of the training."""
        return torch.is_grad_enabled() and threading.get_ident() == self._thread

    def go_on(self, loader: EpochLoader) -> None:
        if loader not in self._gone_on:
            self._gone_on.add(loader)
            self._context.say(
                f"{loader.name!r} goes on in epoch {loader.epoch}: a loop that counts epochs from 0, as range(n) does, "
                "makes more steps than without the restart; for epoch in loader.epochs(n) makes as many"
            )

    def give(self, loader: EpochLoader, share: StepShare) -> None:
        if self._step_ended:
            self._in_use.clear()
            self._step_ended = False
        self._unused[loader] += 1
        self._given.add(loader)
        self.draws |= self._is_in_training()
        if torch.is_grad_enabled() or loader in self._in_use:
            self._in_use[loader] = self.latest = share
        if loader is not self._loader:  # samples of an evaluation do not count for the next step
            self._loader, self._samples = loader, 0
        self._samples += share.samples
        self._metrics.waited += loader.waited
        loader.waited = 0.0

    def passed(self) -> None:
        """A backward pass has been made, of which an optimizer's step tells too."""
        self._used = {*(self._used or ()), *self._unused}
        self._unused.clear()

    def leave(self, loader: EpochLoader, *, at_end: bool) -> None:
        if at_end or self._unused[loader] > 1:  # an evaluation, and not a batch that a step takes: next(iter(loader))
            self._in_use.pop(loader, None)

    def end(self) -> None:
        self._steps.end_step()
        self._saves.save_progress(self._steps.done)


def _compare(name: str, dataset: Any, options: LoaderOptions, shared: dict[str, Any]) -> None:
    """Raise SetupError on all ranks if the options of a loader or its data differ between them. Collective."""
    common = {"batch_size": options.batch_size}
    shards = count_shards(dataset)
    if shards > 1:  # which are divided among the workers of all ranks
        common |= {"shards of the dataset": shards, "num_workers": options.of_torch.get("num_workers", 0)}
    compare_options(name, common | shared)
    if not compares():
        return
    lines = [("length of the dataset", str(length_of(dataset)))]
    # A stream without shards is compared as it is read.
    sources = [dataset] if not is_stream(dataset) else sources_of(dataset) if shards > 1 else []
    for number, source in enumerate(sources):
        before = f"source {number}: " if len(sources) > 1 else ""
        lines += [(before + path, text) for path, text in describe_data(source, shards)]
    if difference := find_difference(name, lines):
        raise SetupError(
            f"{name}: the ranks have different data: {difference}: give all ranks the whole data in the same order, "
            "since the loader splits it over them; a random split needs the same seed on all ranks"
        )
