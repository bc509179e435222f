"""Evaluation: every sample counts once over all ranks, which get equally many batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from flk_runtime.data import EvaluationLoader
from flk_runtime.errors import SetupError
from flk_runtime.shared.progress import Phase, ProgressPage
from tests.support.loaders import loader_context


def evaluation(data: Any, rank: int, world_size: int, batch_size: int, **options: Any) -> EvaluationLoader:
    return EvaluationLoader(data, loader_context(batch_size, rank, world_size, of_torch=options))


@given(samples=st.integers(1, 60), world_size=st.integers(1, 8), batch_size=st.integers(1, 5))
def test_each_sample_counts_once_and_each_loop_begins_anew(samples: int, world_size: int, batch_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        loader = evaluation(TensorDataset(torch.arange(samples)), rank, world_size, batch_size)
        next(iter(loader))
        for _ in range(2):
            batches = [(batch.tolist(), count) for (batch,), count in loader]
            assert len(batches) == len(loader) == len(evaluation([0] * samples, 0, world_size, batch_size))
            assert all(count in (0, len(batch)) and 1 <= len(batch) <= batch_size + 1 for batch, count in batches)
        seen += [each for batch, count in batches if count for each in batch]
    assert sorted(seen) == list(range(samples))


def test_what_is_refused() -> None:
    with pytest.raises(SetupError, match="object has no length and index: a loader needs a dataset or an iterable"):
        evaluation(object(), 0, 1, 1)
    for name in ("shuffle", "drop_last", "sampler", "batch_sampler"):
        with pytest.raises(SetupError, match=f"^{name}= cannot be passed: an evaluation takes every sample once"):
            evaluation([1, 2], 0, 1, 1, **{name: True})
    with pytest.raises(SetupError, match="the dataset has 0 samples"):
        evaluation([], 0, 1, 1)
    left = evaluation(iter([1, 2]), 0, 1, 1)
    next(iter(left))
    with pytest.raises(SetupError, match="take one loop over it, to its end, or pass an iterable"):
        next(iter(left))
    once = evaluation(iter([1, 2]), 0, 1, 1)
    assert [count for _, count in once] == [1, 1]
    with pytest.raises(SetupError, match="an iterator can be iterated over only once"):
        list(once)


@pytest.mark.parametrize("data", [[1, 2, 3], iter([1, 2, 3])], ids=["with an index", "iterable"])
def test_options_that_say_what_happens_anyway_are_taken(data: Any) -> None:
    none = dict.fromkeys(("sampler", "batch_sampler", "generator", "collate_fn", "worker_init_fn"))
    loader = evaluation(data, 0, 1, 2, shuffle=False, drop_last=False, **none)
    assert [batch.tolist() for batch, _ in loader] == [[1, 2], [3]]


def test_each_loop_has_random_numbers_of_its_own_in_workers() -> None:
    """As for a mean over several augmentations of the same data."""
    loader = evaluation([1, 2], 0, 1, 2, num_workers=1, collate_fn=lambda _: torch.rand(()).item())
    assert len({value for _ in range(2) for value, _ in loader}) == 2


def test_each_loop_takes_the_same_samples_of_a_stream_that_shuffles() -> None:

    class Shuffled:
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(40)[:4].tolist())

    loader = evaluation(Shuffled(), 0, 1, 4)
    first, second = ([batch.tolist() for batch, _ in loader] for _ in range(2))
    assert first == second


def test_a_loop_is_a_phase_of_its_own_and_each_batch_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ProgressPage.private()
    for module in ("flk_runtime.data.evaluation", "flk_runtime.shared.progress"):
        monkeypatch.setattr(f"{module}.own_page", lambda: page)
    for _ in evaluation([1, 2, 3], 0, 1, 2):
        assert page.phase == Phase.EVALUATING
        assert page.heartbeat_time > 0
    assert page.phase == Phase.STARTING
