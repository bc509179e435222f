"""What ranks compare of their data: it differs where samples would be lost, and not where they only look different."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from flk_runtime.data.fingerprint import describe_data, text_of
from flk_runtime.data.reader import ShareReader, sources_of


class Indexed(Dataset[Any]):
    """A dataset of the script's own. Reading a sample is an error here: nobody may do it but the training."""

    def __init__(self, length: int = 20, **attributes: Any) -> None:
        self.length = length
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError


class Files(IterableDataset[Any]):
    def __init__(self, files: list[str]) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError


def seeded(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


ROWS = torch.arange(60.0).view(20, 3)
DIFFERENT: dict[str, Callable[[int], Any]] = {
    "every second": lambda rank: Subset(Indexed(), range(rank, 20, 2)),
    "another split": lambda rank: random_split(Indexed(), [16, 4], seeded(rank))[0],
    "tensors": lambda rank: TensorDataset(ROWS[rank::2]),
    "tensors of all ranks' own": lambda rank: TensorDataset(torch.randn(20, 3, generator=seeded(rank))),
    "another length": lambda rank: Indexed(20 + rank),
    "another class": lambda rank: (Indexed(), ROWS)[rank],
    "names": lambda rank: Indexed(10, files=[f"/data/{number}.jpg" for number in range(rank, 20, 2)]),
    "windows": lambda rank: Indexed(5, tokens=numpy.arange(12) + 12 * rank),
    "columns": lambda rank: Indexed(10, columns={"x": ROWS[rank::2]}),
    "within others": lambda rank: ConcatDataset([Indexed(), Subset(Indexed(), range(rank, 20, 2))]),
    "a list": lambda rank: [{"text": str(number)} for number in range(rank, 20, 2)],
    "shards": lambda rank: Files([f"{number}.tar" for number in range(rank, 8, 2)]),
}
ALIKE: dict[str, Callable[[int], Any]] = {
    "folders of their own": lambda rank: Indexed(2, files=[f"/tmp/node-{rank}/{number}.jpg" for number in range(2)]),
    "roundings": lambda rank: TensorDataset(ROWS * (1 + rank * 1e-7)),
    "caches": lambda rank: Indexed(2, cache=[torch.ones(2), None] if rank else [None, torch.ones(2)]),
    "what is no data": lambda rank: Indexed(
        20, dtype="f", shape=(rank,), rank=rank, place=(rank, 2), log=["x"] * rank, rng=random.Random(rank)
    ),
    "what a mapping has that is no data": lambda rank: Indexed(20, config={"device_ids": [rank], "of": {"n": [rank]}}),
    "caches by index": lambda rank: Indexed(2, cache={rank: [rank] * 2}),
    "large caches": lambda rank: Indexed(2, cache={str(number): [rank] * 2 for number in range(1000)}),
}


def described(make: Callable[[int], Any], shards: int = 1) -> list[Any]:
    return [describe_data(make(rank), getattr(make(rank), "num_shards", shards)) for rank in range(2)]


@pytest.mark.parametrize("kind", DIFFERENT)
def test_data_that_ranks_have_split_or_made_themselves_differ(kind: str) -> None:
    first, second = described(DIFFERENT[kind])
    assert first != second
    assert first == described(DIFFERENT[kind])[0]


@pytest.mark.parametrize("kind", ALIKE)
def test_the_same_data_are_alike_though_ranks_see_them_a_little_differently(kind: str) -> None:
    first, second = described(ALIKE[kind])
    assert first == second


def test_a_dataset_of_unknown_length_and_much_data_is_described_shortly() -> None:
    class Endless(Indexed):
        def __len__(self) -> int:
            raise NotImplementedError

    inner = Endless()
    inner.inner = inner
    held = {f"part{number}": list(range(20)) for number in range(50)}
    lines = describe_data(Indexed(2, first=inner, held=held), 1)
    assert lines[1:3] == [(f"dataset.first{more}", "Endless of length None") for more in ("", ".inner")]
    assert len(lines) == 100


def test_data_of_hugging_face_are_compared_by_rows_and_sources_and_not_by_transforms() -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets from PyPI")
    whole = datasets.Dataset.from_dict({"n": list(range(20)), "x": [[0.5 * each] for each in range(20)]})

    def noisy(rows: Any) -> Any:
        raise AssertionError

    kinds: list[Callable[[int], Any]] = [
        lambda rank: whole.shard(2, rank),
        lambda rank: whole.shuffle(seed=rank),
        lambda rank: whole.train_test_split(0.2, seed=rank)["train"],
        lambda rank: sources_of(whole.to_iterable_dataset(num_shards=4).shard(2, rank))[0],
    ]
    for make in kinds:
        first, second = described(make)
        assert first != second
        assert first == described(make)[0]
    first, second = described(lambda rank: whole.with_transform(noisy))
    assert first == second


def mark(elements: Any) -> int:
    return next(iter(ShareReader(elements, 0, 2, 20, False)))[1]


def test_a_stream_is_known_by_its_whole_numbers_and_texts_in_their_order() -> None:
    kinds: list[Callable[[int], Any]] = [
        lambda n: n,
        lambda n: {"text": f"line {n}", "x": torch.randn(2)},
        lambda n: (torch.randn(3), torch.tensor(n)),
        lambda n: numpy.arange(n, n + 5),
        lambda n: torch.full((2,), 2.0 ** (n % 100)),
        lambda n: n.to_bytes(2, "big"),
    ]
    for kind in kinds:
        elements = [kind(number) for number in range(50)]
        assert mark(elements) == mark([kind(number) for number in range(50)])
        assert mark(elements) != mark(elements[1:])
        assert mark(elements) != mark([elements[1], elements[0], *elements[2:]])


def test_a_stream_is_the_same_though_it_was_decoded_or_made_noisy_otherwise() -> None:
    pictures = [[(torch.randint(256, (8, 8), dtype=torch.uint8), n) for n in range(50)] for _ in range(2)]
    assert mark(pictures[0]) == mark(pictures[1])
    exact = torch.rand(50, 4) + 1
    assert mark(list(exact)) == mark(list(exact * (1 + 1e-7)))
    assert mark([object()] * 50) == mark([object()] * 50)


def test_elements_that_cannot_be_read_do_not_harm() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    def deep() -> Iterator[Any]:
        nested: list[Any] = []
        nested.append(nested)
        yield from (nested, Odd(), "\udc80", torch.empty(0), torch.eye(2).to_sparse(), float("nan"), 10**5000)

    for entry in deep():
        text_of(entry)
    describe_data(Indexed(1, own=[Odd()], empty=[], meta=torch.empty(3, device="meta")), 1)
