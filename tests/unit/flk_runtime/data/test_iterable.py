"""How a stream is cut into steps and shares, without processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from flk_runtime.data import IterableLoader, Loader, iterable, make_loader, reader
from flk_runtime.data.reader import PartsReader, ShareReader, step_shares
from flk_runtime.errors import MismatchError, SetupError
from flk_runtime.system import rng
from flk_runtime.system.rng import seed_all
from tests.support.loaders import Shares, loader_context

WORLDS = st.integers(1, 7)
BATCHES = st.integers(1, 5)
SAMPLES = st.integers(0, 150)


def steps_of(samples: int, begin: int, world_size: int, batch_size: int, **options: Any) -> list[list[Any]]:
    """[step][rank] of what is left of a stream of numbers from ``begin`` on."""
    size = world_size * batch_size
    every = [list(step_shares(range(begin, samples), r, world_size, size, **options)) for r in range(world_size)]
    assert len(set(map(len, every))) == 1  # all ranks take as many steps
    return [list(step) for step in zip(*every, strict=True)]


@given(samples=SAMPLES, world_size=WORLDS, batch_size=BATCHES)
def test_every_element_once_in_even_steps(samples: int, world_size: int, batch_size: int) -> None:
    steps = steps_of(samples, 0, world_size, batch_size)
    if samples >= world_size:
        assert sorted(i for step in steps for _, _, share in step for i in share) == list(range(samples))
    for step in steps:
        sizes = [len(share) for _, _, share in step]
        assert min(sizes) >= 1
        assert max(sizes) <= min(sizes) + 1
    assert sum(count for step in steps for count, _, _ in step) == samples
    assert all(len(share) == batch_size for step in steps[:-1] for _, _, share in step)


@settings(max_examples=50)
@given(
    samples=SAMPLES,
    worlds=st.lists(st.tuples(WORLDS, BATCHES, st.integers(0, 20)), min_size=1, max_size=5),
)
def test_every_element_once_though_the_world_changes(samples: int, worlds: list[tuple[int, int, int]]) -> None:
    consumed, seen = 0, Counter[int]()
    for number, (world_size, batch_size, most) in enumerate(worlds):
        steps = steps_of(samples, consumed, world_size, batch_size)
        for step in steps if number == len(worlds) - 1 else steps[:most]:
            for count, _, share in step:
                consumed += count
                seen.update(share if count else [])
    assert consumed == samples
    assert seen == Counter(range(samples))


def test_a_state_that_refers_to_what_changes_is_that_of_the_end_of_its_step() -> None:
    seen: list[int] = []

    def stream() -> Iterator[int]:
        for number in range(8):
            seen.append(number)
            yield number

    states = [state for _, state, _ in step_shares(stream(), 0, 2, 4, state=lambda: {"seen": seen})]
    assert states == [{"seen": [0, 1, 2, 3]}, {"seen": list(range(8))}]


def test_a_remainder_that_joins_the_last_step_keeps_what_the_step_says_of_parts() -> None:
    def open_part(part: int, _: Any) -> Any:
        return iter(range(2 + part)), lambda: None

    parts = PartsReader(range(2), [(0, False, None)] * 2, open_part)
    ((_, state, share),) = step_shares(parts, 0, 2, 4, state=parts.changes)
    assert share == [0, 0, 2]
    assert state == {0: (2, True, None), 1: (3, True, None)}


class Numbers(IterableDataset[int]):
    """As torch's documentation shows it: it splits itself over workers, and knows nothing of ranks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id if info else 0, self.count, info.num_workers if info else 1))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stateful:
    """It can go to a position without reading what comes before."""

    def __init__(self) -> None:
        self.position = 0
        self.begun: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.begun.append(self.position)
        for number in range(self.position, 23):
            self.position = number + 1
            yield number
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self.begun = []


def one(dataset: Any, **options: Any) -> Any:
    return make_loader(dataset, loader_context(options.pop("batch_size", 4), **options))


def values(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_neither_samples_nor_their_order(workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers == 2}
    stream = one(Numbers(23), **options)
    assert isinstance(stream, IterableLoader)
    seen = [values(stream) for _ in stream.epochs(2)]
    assert seen == [list(range(23))] * 2
    # Interrupted, and resumed with other workers.
    for batch in stream:
        if batch[0] == 8:
            break
    assert stream.state_dict()["consumed"] == 12
    resumed = one(Numbers(23), batch_size=3)
    resumed.load_state_dict(stream.state_dict())
    assert values(resumed) == list(range(12, 23))
    assert (resumed.epoch, resumed.consumed) == (3, 0)
    assert values(resumed) == list(range(23))
    # Without a restart, it begins the next epoch.
    assert values(stream) == list(range(23))


def test_ranks_agree_on_the_next_step_during_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def sums(*values: int) -> Any:
        events.append("ask")

        def wait() -> list[int]:
            events.append("wait")
            return [2 * value for value in values]  # both ranks have as much

        return wait

    monkeypatch.setattr(iterable.process_group, "sums", sums)
    monkeypatch.setattr(iterable.process_group, "world_size", lambda: 2)
    monkeypatch.setattr(iterable.process_group, "all_gather", lambda mark: [mark, mark])
    context = loader_context(1, rank=0, world_size=2)
    for _ in IterableLoader(Numbers(6), context):
        events.append("step")
    assert " ".join(events) == "ask wait ask step wait ask step wait ask step wait"


def test_ranks_of_a_mesh_that_read_the_same_part_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of the data, each for two of four ranks."""
    monkeypatch.setattr(iterable.process_group, "sums", lambda *values: lambda: [4 * value for value in values])
    monkeypatch.setattr(iterable.process_group, "world_size", lambda: 4)
    monkeypatch.setattr(iterable.process_group, "all_gather", lambda mark: [mark] * 4)
    shares = Shares()
    assert values(IterableLoader(Numbers(8), loader_context(2, 0, 2, events=shares))) == [0, 2, 4, 6]
    assert [(share.samples, share.own) for share in shares.found] == [(4, 2), (4, 2)]


def test_a_dataset_is_told_the_epoch() -> None:
    dataset = Numbers(5)
    for _ in (stream := one(dataset)).epochs(3):
        values(stream)
    assert dataset.epochs == [0, 1, 2]


def test_an_iterator_that_was_left_would_lose_samples() -> None:
    stream = one(iter(range(23)))
    next(iter(stream))
    with pytest.raises(SetupError, match="the data is an iterator, and a loop over it was left, so samples would be"):
        next(iter(stream))


def test_a_dataset_s_own_state_is_used() -> None:
    stream = one(Stateful())
    for batch in stream:
        if 11 in batch:
            break
    assert stream.state_dict()["parts"] == [[12, False, {"position": 12}]]
    dataset = Stateful()
    resumed = one(dataset, batch_size=2)
    resumed.load_state_dict(stream.state_dict())
    assert values(resumed) == list(range(12, 23))
    assert dataset.begun == []  # it was a copy that began in the middle
    assert values(resumed) == list(range(23))
    assert dataset.begun == [0]
    with pytest.raises(
        MismatchError, match="order here is that of an iterable, and in the checkpoint that of shuffle=True"
    ):
        one(Stateful()).load_state_dict(one([1, 2, 3]).state_dict())


class Reordered(Stateful):
    """It shuffles by a global random generator, and has a state of its own."""

    def __iter__(self) -> Iterator[int]:
        return map(random.sample(range(23), 23).__getitem__, super().__iter__())


def test_a_dataset_with_a_state_that_shuffles_goes_on_in_its_order() -> None:
    stream = one(Reordered())
    begun = values(itertools.islice(stream, 3))
    stream.load_state_dict(stream.state_dict())
    assert sorted(begun + values(stream)) == list(range(23))


@pytest.mark.parametrize("buffer", [0, 5])
def test_a_hugging_face_stream_resumes_from_its_own_state_unless_that_would_lose_elements(buffer: int) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets from PyPI")
    read: list[int] = []

    def watch(row: dict[str, int]) -> dict[str, int]:
        read.append(row["n"])
        return row

    def loader() -> Any:
        data = datasets.Dataset.from_dict({"n": list(range(24))}).to_iterable_dataset(num_shards=3)
        return one((data.shuffle(seed=1, buffer_size=buffer) if buffer else data).map(watch))

    def numbers(batches: Any) -> list[int]:
        return [number for batch in batches for number in batch["n"].tolist()]

    expected = [numbers(whole) for whole in [loader()] for _ in whole.epochs(2)]
    stream = loader()
    begun = numbers(batch for _, batch in zip(range(2), stream, strict=False))
    resumed = loader()
    resumed.load_state_dict(stream.state_dict())
    read.clear()
    assert begun + numbers(resumed) == expected[0]
    assert sorted(read) == sorted(expected[0] if buffer else expected[0][8:])
    assert numbers(resumed) == expected[1]


def test_collate_and_other_options_of_the_data_loader() -> None:
    assert next(iter(one(({"n": n} for n in range(5)), batch_size=5)))["n"].tolist() == [0, 1, 2, 3, 4]
    assert list(one(iter(range(4)), collate_fn=sum)) == [6]
    assert [len(batch) for batch in one(range(10).__iter__(), drop_last=True)] == [4, 4]
    info: Any = get_worker_info  # with the dataset of the script
    assert values(one(Listed([1]), num_workers=2, worker_init_fn=lambda _: info().dataset.elements.append(2))) == [1, 2]


def test_what_has_an_index_is_loaded_by_index() -> None:
    assert isinstance(one([1, 2, 3]), Loader)
    assert isinstance(one(range(10)), Loader)
    assert not isinstance(one({1, 2, 3}), Loader)
    assert values(one(type("Own", (Numbers,), {"__module__": "streaming"})(5))) == list(range(5))  # no library's


def test_what_is_refused() -> None:
    with pytest.raises(SetupError, match="a DataLoader is not a dataset: pass its dataset"):
        one(DataLoader([1, 2]))
    with pytest.raises(SetupError, match="has its own order: shuffle the dataset itself"):
        one(Numbers(5), shuffle=True)
    with pytest.raises(SetupError, match=r"a dict is not a dataset: pass one of its entries .'train', 'test'"):
        one({"train": [1], "test": [2]})
    for data in (Numbers(5), [1, 2, 3]):
        with pytest.raises(SetupError, match="in_order=False"):
            one(data, num_workers=1, in_order=False)
        with pytest.raises(SetupError, match="generator= cannot be passed: pass seed="):
            one(data, generator=torch.Generator())
    with pytest.raises(SetupError, match="sampler= is for data with an index: a Numbers has its own order"):
        one(Numbers(5), sampler=[1])
    with pytest.raises(SetupError, match="epoch 0 of the data has too few samples, 0, for 1 ranks"):
        list(one(iter([])))
    with pytest.raises(SetupError, match="has too few samples, 0, for a step of 4"):
        list(one(iter([1, 2]), drop_last=True))
    exhausted = one(iter([1]))
    values(exhausted)
    with pytest.raises(SetupError, match=r"epoch 1 .* an iterator can be iterated over only once"):
        list(exhausted)


def test_web_datasets_are_not_split_twice() -> None:
    webdataset = pytest.importorskip("webdataset", reason="needs webdataset from PyPI")
    with pytest.raises(SetupError, match="a WebDataset that splits itself over ranks would be split twice"):
        one(webdataset.WebDataset("no-such.tar", shardshuffle=False))


class Shards:
    """A stream with shards of these sizes. An element is a thousand times its shard, and its number."""

    def __init__(self, *sizes: int, chosen: range | None = None) -> None:
        self.sizes, self.chosen = sizes, range(len(sizes)) if chosen is None else chosen

    @property
    def num_shards(self) -> int:
        return len(self.chosen)

    def shard(self, num_shards: int, index: int) -> Shards:
        return type(self)(*self.sizes, chosen=self.chosen[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return (1000 * shard + number for shard in self.chosen for number in range(self.sizes[shard]))


class StatefulShards(Shards):
    """As `Shards`, and it goes to a position without reading what comes before."""

    read: ClassVar[Counter[int]] = Counter()
    position = 0

    def __iter__(self) -> Iterator[int]:
        for number in list(super().__iter__())[self.position :]:
            self.position += 1
            StatefulShards.read[number] += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Ranks:
    """Loaders of a world of ranks, each in a thread, that agree through this object."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self._own, self._barrier = size, [None] * size, threading.Barrier(size, timeout=20)
        self._rank = threading.local()
        monkeypatch.setattr(reader.process_group, "all_gather", self._gather)
        monkeypatch.setattr(IterableLoader, "_ask", self._ask)
        # Torch's global generator is one for all threads, and its lock and Python's may wait for each other.
        monkeypatch.setattr(rng.OwnNumbers, "used", lambda numbers: contextlib.nullcontext())

    def _gather(self, value: Any) -> list[Any]:
        self._own[self._rank.number] = value
        self._barrier.wait()
        found = list(self._own)
        self._barrier.wait()
        return found

    def _ask(self, found: Any) -> Any:
        total = [
            sum(each) for each in zip(*self._gather((int(found is not None), found[0] if found else 0)), strict=True)
        ]
        return lambda: tuple(total)

    def take(self, make: Any, state: Any, steps: int, **options: Any) -> tuple[list[list[int]], Any]:
        """What all ranks get in each of the next ``steps``, and the state after them."""

        def rank(number: int) -> tuple[list[list[int]], Any]:
            self._rank.number = number
            shares = Shares()
            loader = make_loader(make(), loader_context(3, number, self.size, events=shares, **options))
            if state:
                loader.load_state_dict(state)
            seen = [batch[: shares.found[-1].own].tolist() for _, batch in zip(range(steps), loader, strict=False)]
            loader.gather()
            return seen, loader.state_dict()

        with ThreadPoolExecutor(self.size) as pool:
            found = list(pool.map(rank, range(self.size)))
        assert len({len(seen) for seen, _ in found}) == 1
        assert all(state == found[0][1] for _, state in found)
        every = zip(*(seen for seen, _ in found), strict=True)
        return [[number for batch in step for number in batch] for step in every], found[0][1]


@pytest.mark.promise("Training: Each sample comes once over ranks and workers")
@pytest.mark.parametrize("sizes", [(7, 7, 7, 7, 7, 7), (20, 1, 0, 9, 2), (40, 3), (5,) * 12])
@pytest.mark.parametrize("worlds", [(1, 2), (2, 3), (3, 4), (4, 1)])
def test_each_element_of_a_stream_with_shards_comes_once_though_the_world_changes(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], worlds: tuple[int, int]
) -> None:
    for kind, steps in itertools.product((Shards, StatefulShards), (1, 2, 3, 100)):
        seen, state = Ranks(worlds[0], monkeypatch).take(partial(kind, *sizes), None, steps)
        StatefulShards.read.clear()
        if state["epoch"] == 0:
            seen += Ranks(worlds[1], monkeypatch).take(partial(kind, *sizes), state, 100)[0]
        assert sorted(number for step in seen for number in step) == list(Shards(*sizes))
        assert len(seen[0]) == 3 * worlds[0]


def test_ranks_read_shards_of_their_own_and_resume_without_reading_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(2, monkeypatch)
    StatefulShards.read.clear()
    begun, state = ranks.take(lambda: StatefulShards(*(12,) * 4), None, 3)
    # A rank reads one step ahead, and an element that shows whether another step follows.
    ahead = [number + shard for shard in (0, 1000) for number in range(12)]
    assert StatefulShards.read == Counter([*ahead, 2000, 3000])
    assert state["parts"] == [[9, False, {"position": 9}]] * 2
    StatefulShards.read.clear()
    rest, _ = ranks.take(lambda: StatefulShards(*(12,) * 4), state, 100)
    undisturbed, _ = ranks.take(lambda: StatefulShards(*(12,) * 4), None, 100)
    assert begun + rest == undisturbed
    assert set(StatefulShards.read) >= {number for step in rest for number in step}


def test_a_stream_with_other_shards_does_not_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    _, state = Ranks(2, monkeypatch).take(lambda: Shards(9, 9, 9, 9), None, 1)
    for other in (Shards(9, 9), Numbers(36)):
        with pytest.raises(MismatchError, match=r"the checkpoint is of a stream with 4 shards, and this .* has [12]:"):
            one(other).load_state_dict(state)


def test_workers_read_shards_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # torch waits as long for those left
    workers = 2

    class Marked(Shards):
        def __iter__(self) -> Iterator[int]:
            begun = super().__iter__()
            return (100_000 * os.getpid() + number for number in begun)

    sizes = (8, 8, 8, 8)
    stream = one(Marked(*sizes), num_workers=workers, collate_fn=list)
    for _ in stream.epochs(2):
        found = [number for batch in stream for number in batch]
        assert sorted(number % 100_000 for number in found) == list(Shards(*sizes))
        assert len({number // 100_000 for number in found}) == workers
    with torch.device("meta"):  # a script may set the default device
        undisturbed = list(one(Shards(*sizes), num_workers=workers, collate_fn=list))
    left = one(Shards(*sizes), num_workers=workers, collate_fn=list)
    begun = [batch for _, batch in zip(range(3), left, strict=False)]
    resumed = one(Shards(*sizes), num_workers=workers, collate_fn=list)
    resumed.load_state_dict(left.state_dict())
    assert begun + list(resumed) == undisturbed


class Shuffled(IterableDataset[int]):
    """It shuffles its files by a global random generator, and makes its elements noisy by another one."""

    def __init__(self, generator: str) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        files = list(range(10))
        if self.generator == "python":
            random.shuffle(files)
        elif self.generator == "numpy":
            numpy.random.shuffle(files)
        else:
            files = torch.randperm(10).tolist()
        for file in files:
            yield from (1000 * random.randrange(1000) + 10 * file + number for number in range(7))


@pytest.mark.promise("Training: Each sample comes once over ranks and workers")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_a_stream_that_shuffles_has_one_order_for_all_ranks_and_after_a_restart(generator: str, workers: int) -> None:
    shares: list[list[int]] = []
    loaders = [one(Shuffled(generator), rank=rank, world_size=2, num_workers=workers, batch_size=5) for rank in (0, 1)]
    for rank, loader in enumerate(loaders):
        seed_all(100 + rank)
        loader._is_compared = True
        loader._ask = lambda found: lambda: (2, 2 * found[0]) if found else (0, 0)
        before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        shares.append(values(loader))
        assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    both = shares[0] + shares[1]
    assert sorted(each % 1000 for each in both) == [10 * file + number for file in range(10) for number in range(7)]
    again = one(Shuffled(generator), rank=1, world_size=2, num_workers=workers, batch_size=5)
    again._is_compared, again._ask = True, loaders[0]._ask
    again.load_state_dict(again.state_dict() | {"consumed": 40, "parts": [[40, False, None]]})
    assert values(again) == shares[1][20:]
    assert values(loaders[1]) != shares[1]  # in the next epoch


def test_a_stream_with_shards_that_shuffles_resumes_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(Shards):
        def __iter__(self) -> Iterator[int]:
            numbers = list(super().__iter__())
            random.shuffle(numbers)
            return iter(numbers)

    for steps in (2, 4):
        ranks = Ranks(2, monkeypatch)
        begun, state = ranks.take(lambda: Mixed(9, 9, 9, 9), None, steps)
        random.seed(steps)
        rest, _ = Ranks(2, monkeypatch).take(lambda: Mixed(9, 9, 9, 9), state, 100)
        assert sorted(number for step in begun + rest for number in step) == list(Shards(9, 9, 9, 9))


class Listed(IterableDataset[Any]):
    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)


class World:
    """Two ranks of which the other one reads ``elements``."""

    def __init__(self, elements: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self._other = iter(ShareReader(elements, 1, 2, 4, drop_last=False))
        self._mark = next(iter(ShareReader(elements, 1, 2, 4, drop_last=False)))[1]
        monkeypatch.setattr(iterable.process_group, "sums", self._add)
        monkeypatch.setattr(iterable.process_group, "world_size", lambda: 2)
        monkeypatch.setattr(iterable.process_group, "all_true", lambda flag: flag)
        monkeypatch.setattr(iterable.process_group, "all_gather", lambda mark: [mark, self._mark])

    def _add(self, ranks: int, samples: int) -> Any:
        samples += next(self._other)[0]
        return lambda: [ranks + 1, samples]


def test_a_stream_that_ranks_read_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_0(data: Any, steps: int) -> list[int]:
        loader = IterableLoader(data, loader_context(2, 0, 2))
        return values(batch for _, batch in zip(range(steps), loader, strict=False))

    numbers = list(range(20))
    World(numbers, monkeypatch)
    assert rank_0(Listed(numbers), 3) == [0, 2, 4, 6, 8, 10]
    for data in (Listed(numbers), iter(numbers)):
        World(numbers[1:], monkeypatch)
        with pytest.raises(SetupError, match=r"is not the same on all ranks.* by torch's DataLoader"):
            rank_0(data, 1)


def test_an_epoch_in_which_a_rank_has_nothing_names_the_samples_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    World([1], monkeypatch)
    monkeypatch.setattr(iterable.process_group, "sums", lambda *of_this_rank: lambda: of_this_rank)
    loader = IterableLoader(iter([1]), loader_context(2, 0, 2))
    with pytest.raises(SetupError, match=r"too few samples, 1, for 2 ranks$"):
        list(loader)


def test_random_numbers_of_a_stream_s_own_are_no_reason_to_refuse_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Noisy(Listed):
        def __iter__(self) -> Iterator[Any]:
            generator = random.Random()
            return (torch.tensor([number, generator.randrange(1 << 40)]) for number in self.elements)

    World(list(range(20)), monkeypatch)
    loader = IterableLoader(Noisy(range(20)), loader_context(2, 0, 2))
    assert [batch[:, 0].tolist() for _, batch in zip(range(3), loader, strict=False)] == [[0, 2], [4, 6], [8, 10]]
    said = capsys.readouterr().err
    assert said.count("ranks read different elements, by random numbers of the dataset's own") == 1
