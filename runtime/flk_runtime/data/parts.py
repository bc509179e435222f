"""The parts of a stream with shards: which rank and worker reads which, and how far each part has been read.

A part is one shard, or several if they can be divided evenly. A lane is what one process reads: each worker of a rank
has one, and it reads its parts one after the other. Lanes give full shares of a step only. When a rank has none left,
the ranks tell each other how far they are, and all of them read what is left of all parts; see `ShareReader`. A
position is how far each part has been read, so the parts can be divided among any number of ranks and workers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

# Elements of a part that steps have taken, whether that is all of it, and the dataset's own state there.
PartState = tuple[int, bool, Any]
# Yields the elements of a part from a state on; the function gives the dataset's own state after the latest one.
OpenPart = Callable[[int, PartState], tuple[Iterator[Any], Callable[[], Any]]]
UNREAD: PartState = (0, False, None)


def count_shards(dataset: Any) -> int:
    """The number of shards that ``dataset`` can be divided into: 1 if it has no ``num_shards`` and no ``shard``."""
    if is_hugging_face(dataset):
        if _has_step(dataset, lambda name, step: name.startswith(("Take", "Skip")) and step.n is not None):
            return 1  # its shards would take or skip their shares of the number, which are other elements
        return int(dataset.num_shards if hasattr(dataset, "num_shards") else dataset.n_shards)
    count: object = getattr(dataset, "num_shards", None)
    return count if isinstance(count, int) and count > 0 and callable(getattr(dataset, "shard", None)) else 1


def count_parts(shards: int, lanes: int) -> int:
    """The number of parts for ``lanes``: one for each if the shards can be divided evenly, else one for each shard."""
    return lanes if shards % lanes == 0 else shards


def part_of(dataset: Any, part: int, parts: int, epoch: int) -> Any:
    """One of the ``parts`` of ``dataset``."""
    if is_hugging_face(dataset):
        from datasets.distributed import split_dataset_by_node

        found = split_dataset_by_node(dataset, rank=part, world_size=parts)  # in the epoch's order of shards
    else:
        found = dataset.shard(num_shards=parts, index=part)
    set_epoch(found, epoch)  # a part may not have the epoch of the whole
    return found


class PartsReader:
    """The elements of parts from their states on, one part after the other."""

    def __init__(self, parts: Iterable[int], states: Sequence[PartState], open_part: OpenPart) -> None:
        self._parts, self._states, self._open = parts, states, open_part
        self._ended: dict[int, PartState] = {}  # parts that have ended since `changes`

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            self._part, (self._count, done, _) = part, self._states[part]
            if done:
                continue
            elements, self._own_state = self._open(part, self._states[part])
            for element in elements:
                self._count += 1
                yield element
            self._ended[part] = (self._count, True, None)

    def changes(self) -> dict[int, PartState]:
        """The states of the parts that have been read since the last call, after the latest element."""
        ended, self._ended = self._ended, {}
        return {**ended, self._part: (self._count, False, self._own_state())}

    def full_shares(self, size: int) -> Iterator[tuple[int, dict[int, PartState], list[Any]]]:
        """Yield ``size`` elements at a time, as a `flk_runtime.data.reader.ReadShare`. Fewer are left unread."""
        elements = iter(self)
        while len(samples := list(islice(elements, size))) == size:
            yield size, copy.deepcopy(self.changes()), samples


def lanes_of(
    rank: int, world_size: int, workers: int, states: Sequence[PartState], size: int
) -> list[tuple[int, range]]:
    """The lanes of a rank with their parts, in the order in which they give their next shares of ``size``."""
    lanes = world_size * max(1, workers)
    own = [(lane, range(lane, len(states), lanes)) for lane in range(rank, lanes, world_size)]
    return sorted(own, key=lambda each: (sum(states[part][0] for part in each[1]) // size, each[0]))


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell a dataset the epoch, if it wants to know."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def is_hugging_face(dataset: Any) -> bool:
    """Whether ``dataset`` is an IterableDataset of Hugging Face's library datasets."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)


def has_state(dataset: Any) -> bool:
    """Whether ``dataset`` can go to a position by itself; not if it shuffles in a buffer, whose elements it loses."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    shuffles = is_hugging_face(dataset) and _has_step(
        dataset, lambda name, step: "Shuffled" in name and hasattr(step, "buffer_size")
    )
    return not shuffles


def sources_of(dataset: Any) -> list[Any]:
    """What the pipeline of a dataset of Hugging Face begins with, such as names of files, as mappings."""
    return [step.kwargs for step in _steps(dataset) if isinstance(getattr(step, "kwargs", None), dict)]


def _has_step(dataset: Any, wanted: Callable[[str, Any], bool]) -> bool:
    """Whether a dataset of Hugging Face has a step of its pipeline, by the name of its class and itself."""
    return any(wanted(type(step).__name__, step) for step in _steps(dataset))


def _steps(dataset: Any) -> Iterator[Any]:
    waiting = [dataset._ex_iterable]
    while waiting:
        step = waiting.pop()
        yield step
        waiting += [
            inner for inner in [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())] if inner
        ]
