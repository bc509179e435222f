"""IterableLoader: batches of this rank's share of an iterable, which has no index and often no known length.

The stream has one order, in which element i goes to rank i mod world size; so a position in it is the number of
elements that all ranks together have consumed, and means the same at another number of ranks. Every rank reads the
whole stream and keeps its own elements, unless it has shards: see `reader`. The ranks compare the first elements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from flk_runtime.data.loader import EpochLoader, Iteration, LoaderContext, Position
from flk_runtime.data.micro_batches import StepShare, count_pieces, pieces_of
from flk_runtime.data.reader import MarkedShare, ShareReader, count_shards, is_hugging_face
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError

# Modules of libraries whose datasets split themselves over ranks and workers. A script may have its own streaming.py.
_SPLIT_THEMSELVES = ("webdataset.", "streaming.base.", "litdata.")


class IterableLoader(EpochLoader):
    """Batches of this rank's share of an iterable, as tensors on the run's device. Made by `Run.loader`.

    Iterating is collective: the ranks agree that all have a batch, with one all-reduce of 16 bytes. It runs during the
    step before, so a batch is read one step ahead. Of data whose shards can be divided evenly, the workers of all ranks
    read shards of their own, until a rank has no full share of a step left; the ranks read the rest together. Where a
    rank has no more data, the epoch ends on all ranks, and rank 0 prints what is left over. One worker reads what is
    not divided.
    Raises SetupError for a dataset that splits itself, and on all ranks for an epoch with too few samples.
    """

    def __init__(self, dataset: Any, context: LoaderContext) -> None:
        options = dict(context.options.of_torch)
        if refused := sorted({"sampler", "batch_sampler"} & options.keys()):
            raise SetupError(f"{refused[0]}= is for data with an index: a {type(dataset).__name__} has its own order")
        _check_not_split(dataset, context.name)
        super().__init__(dataset, context)
        workers = options.pop("num_workers", 0)
        self._reader = ShareReader(
            dataset,
            context.rank,
            context.world_size,
            context.step_size,
            context.options.drop_last,
            workers,
            count_shards(dataset),
        )
        size = None if context.options.accumulate is None else context.options.batch_size
        collate = _Collate(options.pop("collate_fn", None) or default_collate, size)
        options.pop("persistent_workers", None)  # new ones begin at the position
        pin = context.device.type == "cuda" and workers > 0  # else a collate_fn may have moved the batch
        batches: dict[str, Any] = {"pin_memory": pin, "generator": self._generator, **options, "collate_fn": collate}

        self._make_source = partial(_read, self._reader, workers, batches)
        self._is_compared = context.world_size == 1
        self._is_iterator = isinstance(dataset, Iterator)
        self._is_left = False  # the latest loop has not come to the end of its epoch

    def _batches(self, iteration: Iteration) -> Iterator[Any]:
        if self._is_iterator and self._is_left:
            how = "to its end" if self._context.evaluates else "such as loader.steps(n)"
            raise SetupError(
                f"{self.name}: the data is an iterator, and a loop over it was left, so samples would be lost: take "
                f"one loop over it, {how}, or pass an iterable that can begin anew"
            )
        self._is_left = True
        self._seed_workers()
        least = 1 if self._context.evaluates else self._world_size
        for (own, _, state, (batches, counts)), samples in self._steps():
            if self.consumed == 0 and samples < least:
                raise SetupError(self._too_few(samples))
            self._draw(iteration)
            self._reader.advance(state)
            share = StepShare(samples, own, self._context.count_pieces(samples))
            yield self._give(batches, counts, share, samples, self._reader.start)
        self._is_left = False

    def _go(self, at: Position) -> None:
        super()._go(at)
        self._reader.start = at.data or self._reader.unread

    def _steps(self) -> Iterator[tuple[Any, int]]:
        """Yield this rank's share of each step that is left of the epoch, and the samples of all ranks in it."""
        if self._reader.is_divided:
            yield from self._agreed()
            self._reader.join()
        ranks, samples = yield from self._agreed()
        if self.consumed == 0:
            raise SetupError(self._too_few(samples))
        if ranks and self._rank == 0:
            print(
                f"flk: {self.name}: epoch {self.epoch} ends after {self.consumed} samples, because a rank has no more "
                f"data; {ranks} of {self._world_size} ranks have at least {samples} samples left over",
                file=sys.stderr,
                flush=True,
            )

    def _agreed(self) -> Generator[tuple[Any, int], None, tuple[int, int]]:
        """Yield this rank's next share and the samples of all ranks, as long as all ranks have one.

        Returns the number of ranks that still have one, and of their samples. The ranks agree on the next share while
        this one is in use.
        """
        # Each loop of an evaluation is over the same data.
        self._reader.seed, self._reader.epoch = self._seed, 0 if self._context.evaluates else self._at.epoch
        source = self._timed(self._make_source())
        found = next(source, None)
        if not self._is_compared and not self._reader.is_divided:
            self._is_compared = True
            self._compare(found[1] if found else -1)
        answer = self._ask(found)
        while True:
            this, (ranks, samples) = found, answer()
            if ranks < self._world_size:
                return ranks, samples
            found = next(source, None)
            answer = self._ask(found)
            yield this, samples

    def _too_few(self, samples: int) -> str:
        is_over = self.epoch or (self._is_iterator and not samples)
        hint = ": an iterator can be iterated over only once; pass an iterable" if is_over else ""
        least = f"a step of {self._step_size}" if self._context.options.drop_last else f"{self._world_size} ranks"
        return f"{self.name}: epoch {self.epoch} of the data has too few samples, {samples}, for {least}{hint}"

    def gather(self) -> None:
        if self._saved.data:
            self._reader.gather(self._saved.data)

    def _state(self, at: Position) -> dict[str, Any]:
        return self._reader.state_dict(at.data or self._reader.unread)

    def _data_of(self, state: Mapping[str, Any]) -> Any:
        return self._reader.start_of(state)

    def _ask(self, found: Any) -> Callable[[], list[int]]:
        """Ask all ranks whether they have a share. The answer: the number of those that do, and of their samples.

        Ranks that read the same part of the data, as those of one tensor parallel group, count as one.
        """
        answer, ranks = process_group.sums(int(found is not None), found[0] if found else 0), process_group.world_size()
        return lambda: [total * self._world_size // ranks for total in answer()]

    def _compare(self, mark: int) -> None:
        """Raise SetupError if the ranks have read different elements, unless each reads others each time. Collective.

        Then the elements may differ by random numbers of the dataset's own, as for augmentation.
        """
        if len(set(process_group.all_gather(mark))) == 1:
            return
        again = mark if self._is_iterator else self._reader.mark_again()
        if process_group.all_true(again == mark):
            raise SetupError(
                f"{self.name}: epoch {self.epoch} of the data is not the same on all ranks, and each would leave out "
                "what the loader gives to others: give all ranks the same elements in the same order, or read a "
                "dataset that splits itself over ranks by torch's DataLoader"
            )
        if self._rank == 0:
            print(
                f"flk: {self.name}: ranks read different elements, by random numbers of the dataset's own: an order "
                "that they decide must be the same on all ranks, or samples come twice or never: seed them alike",
                file=sys.stderr,
                flush=True,
            )


def _read(reader: ShareReader, workers: int, options: Mapping[str, Any]) -> Iterator[Any]:
    """The shares of a reader. Workers that read parts of their own give one in turn. ``options``: of DataLoader.

    Each has a DataLoader of its own, as the only worker: a dataset that splits itself over the workers of a DataLoader
    would leave out the elements of the others.
    """
    begin = options.get("worker_init_fn")
    running = []
    for number in range(max(1, workers) if reader.is_divided else 1):
        named = {"num_workers": min(workers, 1), "worker_init_fn": begin and partial(_begin_worker, begin, number)}
        with torch.device("cpu"):  # as in EpochLoader._timed: DataLoader draws its seed on the default device
            running.append(iter(DataLoader(reader.of_worker(number), batch_size=None, **{**options, **named})))
    while running:
        for worker in list(running):
            share = next(worker, None)
            if share is None:
                running.remove(worker)
            else:
                yield share


def _begin_worker(begin: Callable[[int], None], number: int, _: int) -> None:
    """Call the script's ``worker_init_fn`` with the number of a worker among all.

    It finds its own dataset in torch.utils.data.get_worker_info(), which it may change, and not the reader of flk.
    """
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # an info refuses other assignments
    begin(number)


class _Collate:
    """Collates the samples of a share, in micro-batches of ``size``, by default as one batch.

    The result ends with the batches and the numbers of their samples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], size: int | None) -> None:
        self._collate, self._size = collate, size

    def __call__(self, share: MarkedShare) -> tuple[int, int, Any, tuple[list[Any], list[int]]]:
        own, mark, state, samples = share
        pieces = pieces_of(len(samples), count_pieces(len(samples), 1, self._size) if self._size else 1)
        batches = [self._collate(samples[piece.start : piece.stop]) for piece in pieces]
        return own, mark, state, (batches, [len(piece) for piece in pieces])


def _check_not_split(dataset: Any, name: str) -> None:
    """Raise SetupError for a dataset that splits itself over ranks: a second split would lose data."""
    splits = any(kind.__module__.startswith(_SPLIT_THEMSELVES) for kind in type(dataset).__mro__)
    is_part = getattr(dataset, "_distributed", None) is not None and is_hugging_face(dataset)  # split_dataset_by_node
    if is_part or splits:
        raise SetupError(
            f"{name}: a {type(dataset).__name__} that splits itself over ranks would be split twice and lose data: "
            "pass a whole dataset, or read this one by torch's DataLoader"
        )
