"""Reads one rank's samples of each step out of an iterable dataset, in this process or in a DataLoader worker."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from flk_runtime.errors import MismatchError

# One rank's share of a step: samples that count for the position, the dataset's own state after the step, the samples.
ReadShare = tuple[int, Any, list[Any]]


def step_shares(
    stream: Iterable[Any],
    rank: int,
    world_size: int,
    step_size: int,
    *,
    drop_last: bool = False,
    state: Callable[[], Any] = lambda: None,
) -> Iterator[ReadShare]:
    """Yield this rank's share of each step of ``stream``; element i goes to rank i mod world_size.

    A step takes ``step_size`` elements. A remainder of at least ``world_size`` is a step of its own; a
    smaller one is added to the last full step, so a step is yielded once it is known whether another follows. If there
    is no full step (only after a resume with more ranks), ranks without an element repeat the last one, which counts
    once. ``drop_last`` drops the remainder. ``state`` is called at the end of each step.
    """
    held: ReadShare | None = None
    own: list[Any] = []
    count, latest = 0, None
    for latest in stream:
        if count % world_size == rank:
            own.append(latest)
        count += 1
        if held and count == world_size:
            yield held
            held = None
        if count == step_size:
            # A copy, since more is read before the step is yielded, and the state may refer to what changes meanwhile.
            held, own, count = (len(own), copy.deepcopy(state()), own), [], 0
    if held:
        samples = held[2] + own
        yield held if drop_last or not count else (len(samples), None, samples)
    elif count and not drop_last:
        yield len(own), None, own or [latest]


class ShareReader(IterableDataset[ReadShare]):
    """The dataset that DataLoader iterates over: this rank's share of each step, from a position on."""

    def __init__(self, dataset: Any, rank: int, world_size: int, step_size: int, drop_last: bool) -> None:
        self._dataset, self._rank, self._world_size = dataset, rank, world_size
        self._step_size, self._drop_last = step_size, drop_last
        self.has_state = (
            hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not _has_shuffle_buffer(dataset)
        )
        self._parts = self._native_parts()
        self._even = True  # whether all steps of this epoch were full
        self._data: tuple[int, int, Any] | None = None  # epoch, position, and the dataset's own state there
        # Epoch and position: a tensor, since it is shared with persistent workers.
        self.position = torch.zeros(2, dtype=torch.int64)

    def begin(self, epoch: int, consumed: int) -> None:
        """Go to a position; the next iteration starts there."""
        self.position.copy_(torch.tensor([epoch, consumed]))

    @property
    def start(self) -> tuple[int, bool, Any]:
        """The state besides the position with which an iteration starts. Workers know the state of their own start."""
        return self._parts, self._even, self._data

    def advance(self, epoch: int, consumed: int, state: Any, *, even: bool) -> None:
        """Record one step; ``state`` is the dataset's own after it, ``even`` says whether the step was full."""
        self._even = self._even and even
        self._data = None if state is None else (epoch, consumed, state)

    def next_epoch(self) -> None:
        """Forget the position in the epoch that is over."""
        self._parts, self._even, self._data = self._native_parts(), True, None

    def state_dict(self) -> dict[str, Any]:
        """The state that belongs to a position besides epoch and samples consumed."""
        return {"parts": self._parts, "even": self._even, "data": self._data[2] if self._data else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, given together with ``epoch`` and ``consumed``. Raises CheckpointError."""
        if "parts" not in state:
            raise MismatchError(
                f"the checkpoint is of data with an index, and this is an iterable, a {type(self._dataset).__name__}: "
                "resume with the same data, or give the loader another name="
            )
        self._parts, self._even = state["parts"], state["even"]
        self._data = None if state["data"] is None else (state["epoch"], state["consumed"], state["data"])
        if self._parts > 1 and not is_hugging_face(self._dataset):
            raise MismatchError(
                f"the checkpoint is of a Hugging Face dataset, and this one is a {type(self._dataset).__name__}: "
                "resume with the same data"
            )

    def __iter__(self) -> Iterator[ReadShare]:
        epoch, consumed = self.position.tolist()
        return self._steps(epoch, consumed)

    def _steps(self, epoch: int, consumed: int) -> Iterator[ReadShare]:
        """Yield the shares of all steps from a position on."""
        with _hidden_worker():
            set_epoch(self._dataset, epoch)
        if self._parts == self._world_size > 1 and self._even and self._step_size % self._world_size == 0:
            # Each rank reads a part of its own, and all ranks have consumed the same number of elements. Here a rank
            # does not see where the parts of the others end.
            own = _read(self._part(self._rank, epoch), consumed // self._world_size)
            return self._batches(own)
        if self._parts > 1:
            parts = [_read(self._part(part, epoch)) for part in range(self._parts)]
            return self._shares(islice(_round_robin(parts), consumed, None), lambda: None)
        dataset, skip = self._dataset, consumed
        if self._data and self._data[:2] == (epoch, consumed):
            dataset, skip = copy.copy(dataset), 0  # the given dataset starts the next epoch from its beginning
            dataset.load_state_dict(self._data[2])
        return self._shares(_read(dataset, skip), dataset.state_dict if self.has_state else lambda: None)

    def _shares(self, stream: Iterator[Any], state: Callable[[], Any]) -> Iterator[ReadShare]:
        return step_shares(
            stream, self._rank, self._world_size, self._step_size, drop_last=self._drop_last, state=state
        )

    def _batches(self, own: Iterator[Any]) -> Iterator[ReadShare]:
        size = self._step_size // self._world_size
        while batch := list(islice(own, size)):
            if len(batch) == size or not self._drop_last:
                yield len(batch), None, batch

    def _part(self, part: int, epoch: int) -> Any:
        from datasets.distributed import split_dataset_by_node

        data = split_dataset_by_node(self._dataset, rank=part, world_size=self._parts)
        set_epoch(data, epoch)  # a part does not have the epoch of the whole
        return data

    def _native_parts(self) -> int:
        """Number of parts into which the dataset splits itself: one per rank, or 1 if it does not."""
        if not is_hugging_face(self._dataset):
            return 1
        count = self._dataset.num_shards if hasattr(self._dataset, "num_shards") else self._dataset.n_shards
        # If shards cannot be divided evenly, split_dataset_by_node lets each rank read everything too.
        even = count % self._world_size == 0 and self._step_size % self._world_size == 0
        return self._world_size if even else 1


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell a dataset the epoch, if it wants to know."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def is_hugging_face(dataset: Any) -> bool:
    """Whether ``dataset`` is an IterableDataset of Hugging Face's library datasets."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether a dataset of Hugging Face has a buffer for shuffling, whose elements its state does not have."""
    if not is_hugging_face(dataset):
        return False
    waiting = [dataset._ex_iterable]
    while waiting:
        inner = waiting.pop()
        if "Shuffled" in type(inner).__name__ and hasattr(inner, "buffer_size"):
            return True
        waiting += [each for each in [getattr(inner, "ex_iterable", None), *getattr(inner, "ex_iterables", ())] if each]
    return False


def _round_robin(streams: list[Iterator[Any]]) -> Iterator[Any]:
    """Yield one element of each stream in turn, until all have ended."""
    while streams:
        left = []
        for stream in streams:
            for element in stream:
                yield element
                left.append(stream)
                break
        streams = left


def _read(dataset: Iterable[Any], skip: int = 0) -> Iterator[Any]:
    """Yield the elements of ``dataset`` after the first ``skip``, as if there were no DataLoader workers.

    A dataset that splits itself over workers would leave out the elements of the other workers.
    """
    with _hidden_worker():
        iterator = iter(dataset)
    for number in range(sys.maxsize):
        with _hidden_worker():
            try:
                element = next(iterator)
            except StopIteration:
                return
        if number >= skip:
            yield element


@contextmanager
def _hidden_worker() -> Iterator[None]:
    """Make get_worker_info() return None inside."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
