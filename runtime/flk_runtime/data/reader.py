"""Reads one rank's samples of each step out of an iterable dataset, in this process or in a DataLoader worker."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from flk_runtime.data import parts
from flk_runtime.data.fingerprint import StreamFingerprint
from flk_runtime.data.partition import shard_range
from flk_runtime.data.parts import PartsReader, PartState, set_epoch
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError
from flk_runtime.system import rng

# How far parts of a stream with shards have been read, whether all ranks read the rest of all of them together, and the
# dataset's own state, with epoch and position.
ReadState = tuple[list[PartState], bool, Any]
# One rank's share of a step: samples that count for the position, the dataset's own state after the step, the samples.
ReadShare = tuple[int, Any, list[Any]]
# The same, with a fingerprint of all that has been read in the second place. 0: this rank reads shards of its own.
MarkedShare = tuple[int, int, Any, list[Any]]


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


class ShareReader(IterableDataset[MarkedShare]):
    """The dataset that DataLoader iterates over: this rank's share of each step, from a position on.

    Of a stream with shards each worker reads its own parts, and gives full shares. Once `join` is called, this rank
    reads the rest of all parts and takes its share of it, as of a stream without shards.

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
        self._dataset, self._rank, self._world_size, self._workers = dataset, rank, world_size, workers
        self._step_size, self._drop_last = step_size, drop_last
        self.has_state = parts.has_state(dataset)
        self._shards = shards
        self._lane = 0  # the number of the worker that reads, of those that read parts of their own
        lanes = world_size * max(1, workers)
        divides = lanes > 1 and shards > 1
        self.unread: ReadState = ([parts.UNREAD] * parts.count_parts(shards, lanes) if divides else [], False, None)
        """The state at the beginning of an epoch."""
        self.start = self.unread
        # Seed, epoch and position: a tensor, since it is shared with persistent workers.
        self.position = torch.zeros(3, dtype=torch.int64)

    def of_copy(self) -> ShareReader:
        """This reader with a copy of the dataset, which can be read beside it."""
        twin = copy.copy(self)
        twin._dataset = copy.copy(self._dataset)
        return twin

    def of_worker(self, number: int) -> ShareReader:
        """This reader for one of several workers. They share the position."""
        twin = copy.copy(self)
        twin._lane = number
        return twin

    def begin(self, seed: int, epoch: int, consumed: int) -> None:
        """Go to a position; the next iteration starts there."""
        self.position.copy_(torch.tensor([seed, epoch, consumed]))

    @property
    def start(self) -> ReadState:
        """The state besides the position with which an iteration starts. Workers know the state of their own start."""
        return list(self._states), self._is_joined, self._data

    @start.setter
    def start(self, state: ReadState) -> None:
        states, self._is_joined, self._data = state  # the last one: epoch, position, and the dataset's state there
        self._states = list(states)

    @property
    def is_divided(self) -> bool:
        """Whether each worker of each rank reads parts of its own."""
        return bool(self._states) and not self._is_joined and self._step_size >= self._world_size

    def advance(self, epoch: int, consumed: int, state: Any) -> None:
        """Record one step; ``state`` is the dataset's own after it, or those of parts; None if nothing is left."""
        if not self._states:
            self._data = None if state is None else (epoch, consumed, state)
        elif state is None:
            self._states = [(count, True, None) for count, _, _ in self._states]
        else:
            for part, found in state.items():
                self._states[part] = found

    def gather(self) -> None:
        """Get from the other ranks how far they have read their parts. Collective."""
        if self.is_divided:
            own = {part: self._states[part] for _, parts_of_lane in self._lanes() for part in parts_of_lane}
            for states in process_group.all_gather(own):
                for part, state in states.items():
                    self._states[part] = state

    def join(self) -> None:
        """Read from now on with all ranks together what is left of all parts. Collective."""
        self.gather()
        self._is_joined = True

    def state_dict(self, start: ReadState) -> dict[str, Any]:
        """The state ``start`` as plain values, which belongs to a position beside epoch and samples consumed."""
        states, is_joined, data = start
        state = {"parts": len(states) or 1, "data": data[2] if data else None}
        if not states:
            return state
        return {**state, "shards": self._shards, "read": [list(part_state) for part_state in states], "all": is_joined}

    def start_of(self, state: Mapping[str, Any], order: int) -> ReadState:
        """The state of a `state_dict`, which has ``consumed`` too. ``order``: of the epoch. Raises CheckpointError."""
        kind = type(self._dataset).__name__
        if "parts" not in state:
            raise MismatchError(
                f"the checkpoint is of data with an index, and this is an iterable, a {kind}: "
                "resume with the same data, or give the loader another name="
            )
        if state["parts"] > 1 and state.get("shards") != self._shards:
            raise MismatchError(
                f"the checkpoint is of a stream with {state.get('shards', 'other')} shards, and this {kind} has "
                f"{self._shards}: resume with the same data and release of flk"
            )
        states = [(count, done, data) for count, done, data in state.get("read", ())]
        data = None if state["data"] is None else (order, state["consumed"], state["data"])
        return states, state.get("all", False), data

    def __iter__(self) -> Iterator[MarkedShare]:
        seed, epoch, consumed = self.position.tolist()
        fingerprint = StreamFingerprint()
        begins_at = consumed if self._has_state_at(epoch, consumed) else 0
        own = rng.OwnNumbers(rng.derive_seed("stream", seed, epoch, begins_at))
        shares = self._read_shares(seed, epoch, consumed, fingerprint)
        while True:
            with own.used():
                share = next(shares, None)
            if share is None:
                return
            yield share[0], fingerprint.value, *share[1:]

    def _read_shares(self, seed: int, epoch: int, consumed: int, fingerprint: StreamFingerprint) -> Iterator[ReadShare]:
        set_epoch(self._dataset, epoch)
        if self.is_divided:
            _, own = self._lanes()[self._lane]
            return PartsReader(own, self._states, partial(self._open, seed, epoch)).full_shares(self._own_size)
        if self._states:
            rest = PartsReader(range(len(self._states)), self._states, partial(self._open, seed, epoch))
            return self._shares(fingerprint.over(rest), rest.changes)
        dataset, skip = self._dataset, consumed
        if self._data and self._has_state_at(epoch, consumed):
            dataset, skip = copy.copy(dataset), 0  # the given dataset starts the next epoch from its beginning
            dataset.load_state_dict(self._data[2])
        stream = fingerprint.over(_read(dataset, skip))
        return self._shares(stream, dataset.state_dict if self.has_state else lambda: None)

    def _has_state_at(self, epoch: int, consumed: int) -> bool:
        return self._data is not None and self._data[:2] == (epoch, consumed)

    def _shares(self, stream: Iterator[Any], state: Callable[[], Any]) -> Iterator[ReadShare]:
        return step_shares(
            stream, self._rank, self._world_size, self._step_size, drop_last=self._drop_last, state=state
        )

    @property
    def _own_size(self) -> int:
        """The elements of this rank in a full step."""
        return len(shard_range(self._step_size, self._rank, self._world_size))

    def _lanes(self) -> list[tuple[int, range]]:
        return parts.lanes_of(self._rank, self._world_size, self._workers, self._states, self._own_size)

    def _open(self, seed: int, epoch: int, part: int, state: PartState) -> tuple[Iterator[Any], Callable[[], Any]]:
        rng.seed_cpu(rng.derive_seed("stream", seed, epoch, part, state[0] if state[2] is not None else 0))
        dataset = parts.part_of(self._dataset, part, len(self._states), epoch)
        skip, _, data = state
        resumes = parts.has_state(dataset)
        if resumes and data is not None:
            dataset.load_state_dict(data)
            skip = 0
        return _read(dataset, skip), dataset.state_dict if resumes else lambda: None


def _read(dataset: Iterable[Any], skip: int = 0) -> Iterator[Any]:
    """Yield the elements of ``dataset`` after the first ``skip``."""
    yield from itertools.islice(iter(dataset), skip, None)
