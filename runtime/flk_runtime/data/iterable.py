"""Iterable data in a loader: every rank its share of a stream that has no index, and often no known end.

The stream has one order, in which element i goes to rank i mod world size; so a position in it is the number of
elements that all ranks together have consumed, and means the same at another number of ranks. Every rank reads the
whole stream and keeps its own, unless the data can be read in parts: Hugging Face datasets whose shards can be dealt to
the ranks evenly. Then the order is that of the parts, one element of each in turn.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker

from flk_runtime.data.loader import EpochLoader, Loader, LoaderContext, check_options, to_device
from flk_runtime.distributed.process_group import comm_device
from flk_runtime.errors import CheckpointError, SetupError

# Libraries whose datasets split themselves over ranks and workers, each in its own way.
_SHARD_THEMSELVES = {"webdataset": "nodesplitter=webdataset.split_by_node, ", "streaming": "", "litdata": ""}

Share = tuple[int, Any, list[Any]]  # samples that count, the dataset's own state after the step, samples


def loader(dataset: Any, feed: LoaderContext, *, shuffle: bool | None, split: bool, **options: Any) -> EpochLoader:
    """The loader for this kind of data; for the ``options`` see `Loader` and `StreamLoader`."""
    if not _is_stream(dataset):
        if not split:
            raise SetupError("split=False is for iterables: a dataset with length and index is split by the loader")
        return Loader(dataset, feed, shuffle=shuffle is not False, **options)
    if shuffle:
        raise SetupError(
            f"shuffle=True: a {type(dataset).__name__} comes in its own order: shuffle where it is made "
            "(datasets: .shuffle(seed, buffer_size))"
        )
    return StreamLoader(dataset, feed, split=split, **options)


def _is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` can only be iterated over."""
    if isinstance(dataset, Mapping):
        entries = ", ".join(map(repr, list(dataset)[:3]))
        raise SetupError(f"a {type(dataset).__name__} is no dataset: give the loader one of its entries ({entries})")
    if isinstance(dataset, IterableDataset):  # which has a __getitem__ that only fails
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def shares(
    stream: Iterable[Any],
    rank: int,
    world_size: int,
    batch_size: int,
    *,
    drop_last: bool = False,
    state: Callable[[], Any] = lambda: None,
) -> Iterator[Share]:
    """This rank's samples for every step, out of the elements that all ranks share.

    A step takes ``world_size × batch_size`` elements. A rest with at least one for every rank is a step of its own; a
    smaller one joins the last full step, so a step is held back until the next is sure. Where there is none (only after
    a resume at a larger world size), ranks without an element repeat the last one, which counts once. ``drop_last``
    drops the rest. ``state`` is read where a step ends.
    """
    held: Share | None = None
    mine: list[Any] = []
    count, latest = 0, None
    for latest in stream:
        if count % world_size == rank:
            mine.append(latest)
        count += 1
        if held and count == world_size:
            yield held
            held = None
        if count == world_size * batch_size:
            held, mine, count = (len(mine), state(), mine), [], 0
    if held:
        samples = held[2] + mine
        yield held if drop_last or not count else (len(samples), None, samples)
    elif count and not drop_last:
        yield len(mine), None, mine or [latest]


class StreamLoader(EpochLoader):
    """Batches of this rank's share of an iterable, as tensors on the run's device. Made by `Run.loader`.

    All ranks take the same number of steps: before each they agree that all have a batch (one all-reduce of 16 bytes),
    and what is left over where one has none is printed. ``split``: the loader splits the data; else it is split
    already, over ranks and workers.
    """

    def __init__(
        self, dataset: Any, feed: LoaderContext, *, split: bool = True, drop_last: bool = False, **options: Any
    ) -> None:
        check_options(options)
        if split:
            _refuse_split(dataset, feed.name)
        super().__init__(feed)
        self._split = split
        self._taken = 0  # steps of this epoch
        self._reader = _Reader(dataset, feed.rank, feed.world_size, feed.batch_size, drop_last)
        collate = _Collate(options.pop("collate_fn", None) or default_collate, counted=split)
        if options.get("persistent_workers"):
            self._reader.place.share_memory_()  # type: ignore[no-untyped-call]
        self._source: DataLoader[Any] = DataLoader(
            self._reader if split else _Plain(dataset),
            batch_size=None if split else feed.batch_size,
            collate_fn=collate,
            generator=self._generator,
            **{"pin_memory": feed.device.type == "cuda", **({} if split else {"drop_last": drop_last}), **options},
        )

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        self._reader.begin(self.epoch, self.consumed)
        source = iter(self._source)
        if not self._split:
            for _ in islice(source, self._taken):  # what has been consumed
                pass
        while True:
            found = next(source, None)
            samples, state, batch = found or (0, None, None)
            ready, total = self._agree(found is not None, samples)
            fresh = self.consumed == 0
            if fresh and (not ready or (self._split and total < self._world_size)):
                raise SetupError(
                    f"{self.name}: epoch {self.epoch} of the data has {total} samples for {self._world_size} ranks"
                    + (": an iterator can be run through once only; give an iterable" if self.epoch else "")
                )
            if not ready:
                break
            self.consumed += total
            self._taken += 1
            self._reader.advance(self.epoch, self.consumed, state, even=total == self._world_size * self._batch_size)
            self._feed.on_batch(self, total)
            yield to_device(batch, self._feed.device)
        self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The position. It is independent of the number of ranks where the loader splits the data."""
        state = {"seed": self._seed, "epoch": self.epoch, "consumed": self.consumed}
        if not self._split:
            return {**state, "steps": self._taken, "split": [self._world_size, self._batch_size]}
        return {**state, **self._reader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        CheckpointError for data that is split already, and was split for another number of ranks or batch size.
        """
        if ("split" in state) == self._split:
            now, then = ("the loader", "itself") if self._split else ("itself", "the loader")
            raise CheckpointError(f"{self.name}: the data is split by {now}, and was split by {then} in the snapshot")
        if not self._split:
            world_size, batch_size = state["split"]
            if (world_size, batch_size) != (self._world_size, self._batch_size):
                raise CheckpointError(
                    f"{self.name}: data that is split already (split=False) resumes with what the snapshot had, "
                    f"{world_size} ranks and batch_size={batch_size}, "
                    f"not with {self._world_size} and {self._batch_size}"
                )
            self._taken = state["steps"]
        else:
            self._reader.load_state_dict(state)
        self._seed, self.epoch, self.consumed = state["seed"], state["epoch"], state["consumed"]

    def _agree(self, ready: bool, samples: int) -> tuple[bool, int]:
        """Whether all ranks have a batch, and the samples of those that have one. Collective."""
        if self._world_size == 1:
            return ready, samples
        total = torch.tensor([int(ready), samples], device=comm_device(torch.device("cpu")))
        dist.all_reduce(total)
        ranks, samples = total.tolist()
        if 0 < ranks < self._world_size and self._rank == 0:
            print(
                f"flk: {self.name}: epoch {self.epoch} ends after {self._taken} steps, where a rank has no more data; "
                f"{ranks} of {self._world_size} ranks have at least {samples} samples left over",
                file=sys.stderr,
                flush=True,
            )
        return ranks == self._world_size, samples

    def _next_epoch(self) -> None:
        super()._next_epoch()
        self._taken = 0
        self._reader.next_epoch()


class _Reader(IterableDataset[Share]):
    """What DataLoader iterates over, in this process or in each of its workers: this rank's samples, step by step."""

    def __init__(self, dataset: Any, rank: int, world_size: int, batch_size: int, drop_last: bool) -> None:
        self._dataset, self._rank, self._world_size = dataset, rank, world_size
        self._batch_size, self._drop_last = batch_size, drop_last
        self._own_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not _is_hf(dataset)
        self._parts = self._native_parts()
        self._even = True  # whether all steps of this epoch were full
        self._data: tuple[int, int, Any] | None = None  # the dataset's own state, at this epoch and position
        self.place = torch.zeros(2, dtype=torch.int64)  # epoch and position; shared with workers that persist

    def begin(self, epoch: int, consumed: int) -> None:
        self.place.copy_(torch.tensor([epoch, consumed]))

    def advance(self, epoch: int, consumed: int, state: Any, *, even: bool) -> None:
        self._even = self._even and even
        self._data = None if state is None else (epoch, consumed, state)

    def next_epoch(self) -> None:
        self._parts, self._even, self._data = self._native_parts(), True, None

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self._parts, "even": self._even, "data": self._data[2] if self._data else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._parts, self._even = state["parts"], state["even"]
        self._data = None if state["data"] is None else (state["epoch"], state["consumed"], state["data"])
        if self._parts > 1 and not _is_hf(self._dataset):
            raise CheckpointError("the snapshot is of a Hugging Face dataset, which this is not")

    def __iter__(self) -> Iterator[Share]:
        epoch, consumed = self.place.tolist()
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        # Each worker reads all that its rank reads, and makes its own steps' batches only: so the order of samples is
        # the same with any number of workers.
        return islice(self._steps(epoch, consumed), number, None, workers)

    def _steps(self, epoch: int, consumed: int) -> Iterator[Share]:
        with _as_one_process():
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
        if self._parts == self._world_size > 1 and self._even:
            # The ranks' elements are dealt already, as many to each. Here no rank sees where the others' end.
            mine = _quietly(self._part(self._rank), consumed // self._world_size)
            return self._batches(mine)
        if self._parts > 1:
            stream = islice(_in_turn([_quietly(self._part(part)) for part in range(self._parts)]), consumed, None)
            return self._shares(stream, lambda: None)
        dataset, skip = self._dataset, consumed
        if self._data and self._data[:2] == (epoch, consumed):
            dataset, skip = copy.copy(dataset), 0  # the given one begins anew in the next epoch
            dataset.load_state_dict(self._data[2])
        return self._shares(_quietly(dataset, skip), dataset.state_dict if self._own_state else lambda: None)

    def _shares(self, stream: Iterator[Any], state: Callable[[], Any]) -> Iterator[Share]:
        return shares(stream, self._rank, self._world_size, self._batch_size, drop_last=self._drop_last, state=state)

    def _batches(self, mine: Iterator[Any]) -> Iterator[Share]:
        while batch := list(islice(mine, self._batch_size)):
            if len(batch) == self._batch_size or not self._drop_last:
                yield len(batch), None, batch

    def _part(self, part: int) -> Any:
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(self._dataset, rank=part, world_size=self._parts)

    def _native_parts(self) -> int:
        """Into how many parts the data is split by its own means: one per rank, or not at all."""
        if not _is_hf(self._dataset):
            return 1
        count = self._dataset.num_shards if hasattr(self._dataset, "num_shards") else self._dataset.n_shards
        # Where shards can't be dealt evenly, split_dataset_by_node lets each rank read everything too.
        return self._world_size if count % self._world_size == 0 else 1


class _Plain(IterableDataset[Any]):
    """Data that is split already, for DataLoader."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


class _Collate:
    """A batch out of samples, beside the number of them that count and the dataset's own state."""

    def __init__(self, collate: Callable[[list[Any]], Any], *, counted: bool) -> None:
        self._collate, self._counted = collate, counted

    def __call__(self, found: Any) -> tuple[int, Any, Any]:
        samples, state, content = found if self._counted else (len(found), None, found)
        return samples, state, self._collate(content)


def _refuse_split(dataset: Any, name: str) -> None:
    libraries = {kind.__module__.partition(".")[0] for kind in type(dataset).__mro__}
    for library, how in _SHARD_THEMSELVES.items():
        if library in libraries:
            raise SetupError(
                f"{name}: a {type(dataset).__name__} of {library} splits itself over ranks and workers, so a second "
                f"split would lose data: pass {how}split=False"
            )
    if getattr(dataset, "_distributed", None) is not None and _is_hf(dataset):
        raise SetupError(f"{name}: the dataset is split by node already: give the whole dataset, or pass split=False")


def _is_hf(dataset: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)


def _in_turn(streams: list[Iterator[Any]]) -> Iterator[Any]:
    """One element of each stream in turn, until all have ended."""
    while streams:
        left = []
        for stream in streams:
            for element in stream:
                yield element
                left.append(stream)
                break
        streams = left


def _quietly(dataset: Iterable[Any], skip: int = 0) -> Iterator[Any]:
    """The elements of ``dataset`` after the first ``skip``, which does not see that it is in one of several workers.

    Datasets that split themselves over workers would leave out what the others are to read.
    """
    with _as_one_process():
        iterator = iter(dataset)
    for number in range(sys.maxsize):
        with _as_one_process():
            try:
                element = next(iterator)
            except StopIteration:
                return
        if number >= skip:
            yield element


@contextmanager
def _as_one_process() -> Iterator[None]:
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
