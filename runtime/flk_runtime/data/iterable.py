"""IterableLoader: batches of this rank's share of an iterable, which has no index and often no known length.

The stream has one order, in which element i goes to rank i mod world size; so a position in it is the number of
elements that all ranks together have consumed, and means the same at another number of ranks. Every rank reads the
whole stream and keeps its own elements, unless it has shards: see `reader`. The ranks compare the first elements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from flk_runtime.data.loader import EpochLoader, Iteration, LoaderContext, Position
from flk_runtime.data.micro_batches import StepShare, count_pieces, pieces_of
from flk_runtime.data.reader import ShareReader, count_shards, is_hugging_face, set_epoch
from flk_runtime.distributed import comm_device, process_group
from flk_runtime.errors import MismatchError, SetupError

# Libraries whose datasets split themselves over ranks and workers, and the option to pass to them for that.
_SPLIT_THEMSELVES = {"webdataset": "nodesplitter=webdataset.split_by_node, ", "streaming": "", "litdata": ""}


class IterableLoader(EpochLoader):
    """Batches of this rank's share of an iterable, as tensors on the run's device. Made by `Run.loader`.

    Iterating is collective: the ranks agree that all have a batch, with one all-reduce of 16 bytes. It runs during the
    step before, so a batch is read one step ahead. Of data whose shards can be divided evenly, the workers of all ranks
    read shards of their own, until a rank has no full share of a step left; the ranks read the rest together. Where a
    rank has no more data, the epoch ends on all ranks, and rank 0 prints what is left over; in an evaluation the rank
    repeats its latest batch, which counts 0, until no rank has another.
    With ``split=False`` the data is split over ranks and workers already. Else one worker reads what is not divided.
    Raises SetupError for a dataset that would be split twice, and on all ranks for an epoch with too few samples.
    """

    def __init__(self, dataset: Any, context: LoaderContext) -> None:
        split, drop_last = context.options.split, context.options.drop_last
        options = dict(context.options.of_torch)
        if refused := sorted({"sampler", "batch_sampler"} & options.keys()):
            raise SetupError(f"{refused[0]}= is for data with an index: a {type(dataset).__name__} has its own order")
        if split:
            _check_not_split(dataset, context.name)
        super().__init__(context)
        self._split, self._drop_last = split, drop_last
        self._taken = 0  # steps of this epoch
        self._workers = options.get("num_workers", 0)
        shards = count_shards(dataset) if split else 1
        self._reader = ShareReader(
            dataset, context.rank, context.world_size, context.step_size, drop_last, self._workers, shards
        )
        size = None if context.options.accumulate is None else context.options.batch_size
        collate = _Collate(options.pop("collate_fn", None) or default_collate, size, counted=split)
        options.pop("persistent_workers", None)  # new ones begin at the position
        pin = context.device.type == "cuda"
        batches: dict[str, Any] = {"pin_memory": pin, "generator": self._generator, **options, "collate_fn": collate}

        def make_source() -> Iterable[Any]:
            if not split:
                data = _SplitDataset(dataset, self._at.epoch)
                return DataLoader(data, batch_size=context.options.rank_size, drop_last=drop_last, **batches)
            if self._workers > 1 and self._reader.is_divided:
                return _from_workers(self._reader, self._workers, batches)
            return DataLoader(self._reader, batch_size=None, **{**batches, "num_workers": min(self._workers, 1)})

        self._make_source = make_source
        self._is_compared = not split or context.world_size == 1
        self._is_iterator = isinstance(dataset, Iterator)
        # Of an iterator, which cannot begin again: epoch and samples consumed where it was left, and the rest.
        self._left: tuple[tuple[int, int], Iterator[tuple[Any, int, int]]] | None = None

    def _batches(self, iteration: Iteration) -> Iterator[Any]:
        self._seed_workers()
        source, evaluates = self._rest(), self._context.evaluates
        least = 1 if evaluates else self._world_size if self._split else 0
        batch: Any = None
        for found, ranks, total in source:
            samples, _, state, batch = found or (0, 0, None, batch)
            is_over = ranks < (1 if evaluates else self._world_size)
            if is_over:
                self._say_left_over(ranks, total)
            if self.consumed == 0 and (ranks < self._world_size or total < least):
                raise SetupError(self._too_few(total))
            if is_over:
                break
            self._draw(iteration)
            self._taken += 1
            self._reader.advance(state)
            if self._is_iterator and not self._workers:
                self._left = (self._at.epoch, self.consumed + total), source
            batches, counts = batch
            share = self._share(total, samples)
            yield self._give(batches, counts, share, total, (self._taken, self._reader.start))
        self._left = None

    def _first(self, at: Position) -> Position:
        return self._at if self._is_iterator else at  # which cannot begin anew

    def _go(self, at: Position) -> None:
        super()._go(at)
        self._taken, self._reader.start = at.data or (0, self._reader.unread)

    def _share(self, total: int, own: int) -> StepShare:
        options = self._context.options
        # Data that is split already may leave ranks with different numbers of micro-batches at its end.
        pieces = self._context.count_pieces(total) if self._split else options.accumulate or 1
        return StepShare(total, own, pieces)

    def _rest(self) -> Iterator[tuple[Any, int, int]]:
        """The rest of the epoch, from the dataset or from where the last iteration has been left, as `_agreed`."""
        if self._left and self._left[0] == (self._at.epoch, self.consumed):
            return self._left[1]
        return self._steps()

    def _steps(self) -> Iterator[tuple[Any, int, int]]:
        if self._reader.is_divided:
            for step in self._agreed(self._read(), by_all=True):
                if step[1] < self._world_size:
                    break
                yield step
            self._reader.join()
        source = self._read()
        if not self._split:
            for _ in islice(source, self._taken):  # skips what has been consumed
                pass
        yield from self._agreed(source, by_all=not self._context.evaluates)

    def _read(self) -> Iterator[Any]:
        """This rank's shares from the position on."""
        self._reader.seed, self._reader.epoch = self._seed, self._at.epoch
        return self._timed(self._make_source())

    def _agreed(self, source: Iterator[Any], *, by_all: bool) -> Iterator[tuple[Any, int, int]]:
        """Yield this rank's next share (None: it has none), the number of ranks that have one, and of their samples.

        The ranks agree on the next share while this one is in use. With ``by_all`` the last one is the first that a
        rank does not have.
        """
        found = next(source, None)
        if not self._is_compared and not self._reader.is_divided:
            self._is_compared = True
            self._compare(found[1] if found else -1)
        answer = self._ask(found)
        while True:
            this, (ranks, samples) = found, answer()
            if ranks == self._world_size or (ranks and not by_all):
                found = next(source, None)
                answer = self._ask(found)
            yield this, ranks, samples

    def _too_few(self, samples: int) -> str:
        again = self.epoch or (self._is_iterator and not samples)
        hint = ": an iterator can be iterated over only once; pass an iterable" if again else ""
        least = f"a step of {self._step_size}" if self._drop_last and self._split else f"{self._world_size} ranks"
        return f"{self.name}: epoch {self.epoch} of the data has too few samples, {samples}, for {least}{hint}"

    def gather(self) -> None:
        saved = self._saved
        if saved.data:
            taken, start = saved.data
            gathered = saved._replace(data=(taken, self._reader.gathered(start)))
            if self._context.events.counts_steps:
                self._trained = gathered
            else:
                self._at = gathered

    def _state(self, at: Position) -> dict[str, Any]:
        taken, start = at.data or (0, self._reader.unread)
        if not self._split:
            return {"steps": taken, "split": self._split_by}
        return self._reader.state_dict(start)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position from `state_dict`.

        Raises CheckpointError if ``split`` differs, and, for data that is split already, if the number of ranks or of
        workers, the batch size or drop_last does.
        """
        if ("split" in state) == self._split:
            now, then = (True, False) if self._split else (False, True)
            raise MismatchError(f"{self.name}: split={now} here, and split={then} in the checkpoint")
        if self._split:
            self._restore(state, (0, self._reader.start_of(state)))
        elif state["split"] != self._split_by:
            then_by, now_by = (
                ", ".join(f"{name} {by[name]}" for name in by) for by in (state["split"], self._split_by)
            )
            raise MismatchError(
                f"{self.name}: data with split=False resumes as it was split for the checkpoint, with {then_by}, not "
                f"with {now_by}"
            )
        else:
            self._restore(state, (state["steps"], self._reader.unread))
        self._go(self._at)

    @property
    def _split_by(self) -> dict[str, Any]:
        """The settings that decide the order of data with ``split=False``, and so the meaning of a position."""
        return {
            "ranks": self._world_size,
            "batch_size": self._context.options.rank_size,
            "num_workers": max(1, self._workers),
            "drop_last": self._drop_last,
        }

    def _ask(self, found: Any) -> Callable[[], tuple[int, int]]:
        """Ask all ranks whether they have a share. The answer: the number of those that do, and of their samples."""
        own = (int(found is not None), found[0] if found else 0)
        if self._world_size == 1:
            return lambda: own
        total = torch.tensor(own, device=comm_device(torch.device("cpu")))
        work = dist.all_reduce(total, async_op=True)

        def answer() -> tuple[int, int]:
            work.wait()
            ranks, samples = total.tolist()
            return ranks, samples

        return answer

    def _compare(self, mark: int) -> None:
        """Raise SetupError if the ranks have read different elements, unless each reads others each time. Collective.

        Then the elements may differ by random numbers of the dataset's own, as for augmentation.
        """
        if len(set(process_group.all_gather(mark))) == 1:
            return
        again = mark if self._is_iterator else self._reader.mark_again()
        if process_group.all_true(again == mark)():
            raise SetupError(
                f"{self.name}: epoch {self.epoch} of the data is not the same on all ranks, and each would leave out "
                "what the loader gives to others: pass split=False if the dataset splits itself over ranks; else give "
                "all ranks the same elements in the same order"
            )
        if self._rank == 0:
            print(
                f"flk: {self.name}: ranks read different elements, by random numbers of the dataset's own: an order "
                "that they decide must be the same on all ranks, or samples come twice or never: seed them alike",
                file=sys.stderr,
                flush=True,
            )

    def _say_left_over(self, ranks: int, samples: int) -> None:
        if ranks and self._rank == 0:
            print(
                f"flk: {self.name}: epoch {self.epoch} ends after {self._taken} steps, because a rank has no more "
                f"data; {ranks} of {self._world_size} ranks have at least {samples} samples left over",
                file=sys.stderr,
                flush=True,
            )


class _SplitDataset(IterableDataset[Any]):
    """Wraps an iterable that is split already, for DataLoader."""

    def __init__(self, dataset: Any, epoch: int) -> None:
        self._dataset, self._epoch = dataset, epoch

    def __iter__(self) -> Iterator[Any]:
        set_epoch(self._dataset, self._epoch)
        return iter(self._dataset)


def _from_workers(reader: ShareReader, workers: int, options: Mapping[str, Any]) -> Iterator[Any]:
    """Shares of a reader whose workers read parts of their own, each worker in turn. ``options``: of DataLoader.

    Each has a DataLoader of its own, as the only worker: a dataset that splits itself over the workers of a DataLoader
    would leave out the elements of the others.
    """
    begin = options.get("worker_init_fn")
    running = []
    for number in range(workers):
        named = {"num_workers": 1, "worker_init_fn": begin and partial(_begin_worker, begin, number)}
        running.append(iter(DataLoader(reader.of_worker(number), batch_size=None, **{**options, **named})))
    while running:
        for worker in list(running):
            try:
                share = next(worker)
            except StopIteration:
                running.remove(worker)
            else:
                yield share


def _begin_worker(begin: Callable[[int], None], number: int, _: int) -> None:
    """Call the script's ``worker_init_fn`` with the number of a worker among all."""
    begin(number)


class _Collate:
    """Collates the samples of a share, in micro-batches of ``size``; passes on all else.

    By default they are one batch. The result ends with the batches and the numbers of their samples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], size: int | None, *, counted: bool) -> None:
        self._collate, self._size, self._counted = collate, size, counted

    def __call__(self, found: Any) -> tuple[int, int, Any, tuple[list[Any], list[int]]]:
        samples, mark, state, content = found if self._counted else (len(found), 0, None, found)
        pieces = pieces_of(len(content), count_pieces(len(content), 1, self._size) if self._size else 1)
        batches = [self._collate(content[piece.start : piece.stop]) for piece in pieces]
        return samples, mark, state, (batches, [len(piece) for piece in pieces])


def _check_not_split(dataset: Any, name: str) -> None:
    """Raise SetupError for a dataset that splits itself over ranks: a second split would lose data."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(dataset).__mro__}
    for library, option in _SPLIT_THEMSELVES.items():
        if library in libraries:
            raise SetupError(
                f"{name}: a {type(dataset).__name__} of {library} splits itself over ranks and workers, so a second "
                f"split would lose data: pass {option}split=False"
            )
    if getattr(dataset, "_distributed", None) is not None and is_hugging_face(dataset):
        raise SetupError(
            f"{name}: the dataset is already split by split_dataset_by_node: pass the whole dataset, or split=False"
        )
