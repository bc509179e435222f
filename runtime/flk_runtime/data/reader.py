"""Reads one rank's samples of each step out of an iterable dataset, in this process or in a DataLoader worker.

A stream is one part, which every rank reads and of which it keeps its own elements. Where its shards can be divided
evenly by the *lanes*, which are the workers of all ranks, or the ranks, each lane has a part of its own. Lanes give
full shares of a step only; once a rank has none left, and after a resume with another number of lanes, all ranks read
together what is left of all parts.
"""

from __future__ import annotations

import copy
import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from torch.utils.data import IterableDataset

from flk_runtime.data.fingerprint import text_of
from flk_runtime.data.partition import shard_range
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError
from flk_runtime.system import rng

_FIRST: Final = 64  # elements of a stream that ranks compare

# Elements of a part that steps have taken, whether that is all of it, and the dataset's own state there.
PartState = tuple[int, bool, Any]
# One rank's share of a step: samples that count for the position, how far parts have been read, the samples.
ReadShare = tuple[int, Any, list[Any]]
# The same, with a fingerprint of the first elements in the second place. 0: this rank reads a part of its own.
MarkedShare = tuple[int, int, Any, list[Any]]
# Yields the elements of a part from a state on; the function gives the dataset's own state after the latest one.
OpenPart = Callable[[int, PartState], tuple[Iterator[Any], Callable[[], Any]]]


class ReadState(NamedTuple):
    """How far a stream has been read. Only `ShareReader.gather` changes one."""

    parts: list[PartState]
    is_joined: bool = False  # all ranks read what is left of all parts together


def count_shards(dataset: Any) -> int:
    """The number of shards that ``dataset`` can be divided into: 1 if it has no ``num_shards`` and no ``shard``."""
    if any(name.startswith(("Take", "Skip")) and step.n is not None for name, step in _steps(dataset)):
        return 1  # its shards would take or skip their shares of the number, which are other elements
    count: object = getattr(dataset, "num_shards", None)
    return count if isinstance(count, int) and count > 0 and callable(getattr(dataset, "shard", None)) else 1


def sources_of(dataset: Any) -> list[Any]:
    """The objects that must be the same on all ranks if a stream is divided by its shards, such as names of files."""
    kwargs = [step.kwargs for _, step in _steps(dataset) if isinstance(getattr(step, "kwargs", None), dict)]
    return kwargs if is_hugging_face(dataset) else [dataset]


def is_hugging_face(dataset: Any) -> bool:
    """Whether ``dataset`` is an IterableDataset of Hugging Face's library datasets."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)


def _steps(dataset: Any) -> Iterator[tuple[str, Any]]:
    """The steps of the pipeline of a dataset of Hugging Face, with the names of their classes."""
    waiting = [dataset._ex_iterable] if is_hugging_face(dataset) else []
    while waiting:
        step = waiting.pop()
        yield type(step).__name__, step
        waiting += [
            inner for inner in [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())] if inner
        ]


def has_state(dataset: Any) -> bool:
    """Whether ``dataset`` can go to a position by itself; not if it shuffles in a buffer, whose elements it loses."""
    shuffles = any("Shuffled" in name and hasattr(step, "buffer_size") for name, step in _steps(dataset))
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not shuffles


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell a dataset the epoch, if it wants to know."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def part_of(dataset: Any, part: int, parts: int, epoch: int) -> Any:
    """One of the ``parts`` of ``dataset``."""
    if parts == 1:
        found = dataset
    elif is_hugging_face(dataset):
        from datasets.distributed import split_dataset_by_node

        found = split_dataset_by_node(dataset, rank=part, world_size=parts)  # in the epoch's order of shards
    else:
        found = dataset.shard(num_shards=parts, index=part)
    set_epoch(found, epoch)  # a part may not have the epoch of the whole
    return found


def step_shares(
    stream: Iterable[Any],
    rank: int,
    world_size: int,
    step_size: int,
    *,
    drop_last: bool = False,
    state: Callable[[], dict[Any, Any]] = dict,
) -> Iterator[ReadShare]:
    """Yield this rank's share of each step of ``stream``; element i goes to rank i mod world_size.

    A step takes ``step_size`` elements. A remainder of at least ``world_size`` is a step of its own; a
    smaller one is added to the last full step, so a step is yielded once it is known whether another follows. If there
    is no full step (only after a resume with more ranks), ranks without an element repeat the last one, which counts
    once. ``drop_last`` drops the remainder. ``state`` is called at the end of each step, for what has changed in it.
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
        yield held if drop_last or not count else (len(samples), {**held[1], **state()}, samples)
    elif count and not drop_last:
        yield len(own), state(), own or [latest]


class PartsReader:
    """The elements of parts from their states on, one part after the other."""

    def __init__(self, parts: Iterable[int], states: Sequence[PartState], open_part: OpenPart) -> None:
        self._parts, self._states, self._open = parts, states, open_part
        self._ended: dict[int, PartState] = {}  # parts that have ended since `changes`
        self.mark = 0
        """A number of 24 bits, of the first elements."""

    def __iter__(self) -> Iterator[Any]:
        total = 0
        for part in self._parts:
            if self._states[part][1]:
                continue
            self._part, self._count = part, self._states[part][0]
            elements, self._own_state = self._open(part, self._states[part])
            for element in elements:
                self._count += 1
                if total < _FIRST:
                    self.mark = zlib.crc32(text_of(element).encode(errors="replace"), self.mark) & 0xFFFFFF
                total += 1
                yield element
            self._ended[part] = (self._count, True, None)

    def changes(self) -> dict[int, PartState]:
        """The states of the parts that have been read since the last call, after the latest element."""
        ended, self._ended = self._ended, {}
        return {self._part: (self._count, False, self._own_state()), **ended}


class ShareReader(IterableDataset[MarkedShare]):
    """The dataset that DataLoader iterates over: this rank's share of each step, from a position on.

    While it reads, the global random generators have states of the stream's own, seeded by epoch and part. So a stream
    that shuffles by them has the same order on all ranks, and again after a restart, which skips what has been read.
    """

    def __init__(
        self,
        dataset: Any,
        rank: int,
        world_size: int,
        step_size: int,
        drop_last: bool,
        workers: int = 0,
        shards: int = 1,
    ) -> None:
        self.dataset, self._rank, self._world_size = dataset, rank, world_size
        self._step_size, self._drop_last = step_size, drop_last
        self._own_size = len(shard_range(step_size, rank, world_size))  # elements of this rank in a full step
        self._shards = shards
        self._worker = 0  # the number of the worker that reads, of those that read parts of their own
        lanes = world_size * max(1, workers)
        divides = shards % lanes == 0 and step_size >= world_size
        self.unread = ReadState([(0, False, None)] * (lanes if divides else 1))
        """The state at the beginning of an epoch."""
        self.start = self.unread
        """The state with which an iteration starts. Workers know that of their own start."""
        self.seed = self.epoch = 0

    def of_worker(self, number: int) -> ShareReader:
        """This reader for one of several workers."""
        twin = copy.copy(self)
        twin._worker = number
        return twin

    def mark_again(self) -> int:
        """The mark of the first share, read once more by a copy; -1 if that fails."""
        twin = copy.copy(self)
        try:
            twin.dataset = copy.copy(self.dataset)
            return next(iter(twin))[1]
        except Exception:  # of any kind: a dataset may be read once at a time
            return -1

    @property
    def is_divided(self) -> bool:
        """Whether each worker of each rank reads a part of its own."""
        return self._divides(self.start)

    def _divides(self, state: ReadState) -> bool:
        return not state.is_joined and 1 < len(state.parts) == len(self.unread.parts)

    def advance(self, changes: dict[int, PartState]) -> None:
        """Record one step, after which parts have these states."""
        self.start = self.start._replace(
            parts=[changes.get(part, state) for part, state in enumerate(self.start.parts)]
        )

    def gather(self, state: ReadState) -> None:
        """Add to ``state`` what the other ranks know of the parts that they read. Collective if they read their own."""
        if self._divides(state):
            own = self._rank, state.parts[self._rank :: self._world_size]
            for rank, parts in process_group.all_gather(own):  # of a mesh, several ranks read the same parts
                state.parts[rank :: self._world_size] = parts

    def join(self) -> None:
        """Read from now on with all ranks together what is left of all parts. Collective."""
        self.gather(self.start)
        self.start = self.start._replace(is_joined=True)

    def state_dict(self, start: ReadState) -> dict[str, Any]:
        """The state ``start`` as plain values, which belongs to a position beside epoch and samples consumed."""
        return {"shards": self._shards, "parts": [list(part) for part in start.parts], "joined": start.is_joined}

    def start_of(self, state: Mapping[str, Any]) -> ReadState:
        """The state of a `state_dict`. Raises CheckpointError for one of other data."""
        kind = type(self.dataset).__name__
        if len(state["parts"]) > 1 and state["shards"] != self._shards:
            raise MismatchError(
                f"the checkpoint is of a stream with {state['shards']} shards, and this {kind} has {self._shards}: "
                "resume with the same data"
            )
        return ReadState([(count, done, data) for count, done, data in state["parts"]], state["joined"])

    def __iter__(self) -> Iterator[MarkedShare]:
        seed, epoch = self.seed, self.epoch
        states, is_divided = self.start.parts, self.is_divided
        own = rng.OwnNumbers(rng.derive_seed("stream", seed, epoch))
        lanes = range(self._rank, len(states), self._world_size)
        # The worker whose turn it is comes first: a lane that has given fewer shares than others.
        by_turn = sorted(lanes, key=lambda part: (states[part][0] // self._own_size, part))
        parts = [by_turn[self._worker]] if is_divided else range(len(states))
        reader = PartsReader(parts, states, partial(self._open, seed, epoch, len(states)))
        # A lane gives full shares of its own; what is left of it is read together.
        sizes = (0, 1, self._own_size) if is_divided else (self._rank, self._world_size, self._step_size)
        shares = step_shares(reader, *sizes, drop_last=is_divided or self._drop_last, state=reader.changes)
        while True:
            with own.used():
                share = next(shares, None)
            if share is None:
                return
            yield share[0], 0 if is_divided else reader.mark, *share[1:]

    def _open(
        self, seed: int, epoch: int, parts: int, part: int, state: PartState
    ) -> tuple[Iterator[Any], Callable[[], Any]]:
        skip, _, data = state
        rng.seed_cpu(rng.derive_seed("stream", seed, epoch, part))
        dataset = part_of(self.dataset, part, parts, epoch)
        if data is not None:
            dataset = copy.copy(dataset)  # the given dataset starts the next epoch from its beginning
            dataset.load_state_dict(data)
            skip = 0
        return itertools.islice(dataset, skip, None), dataset.state_dict if has_state(dataset) else lambda: None
