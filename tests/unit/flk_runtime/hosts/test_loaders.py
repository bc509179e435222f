"""Loaders that go on at their place in the data."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from flk_runtime.errors import MismatchError
from flk_runtime.hosts.loaders import make_resumable


def resumable(samples: int, batch: int) -> Any:
    loader: Any = DataLoader(list(range(samples)), batch)  # type: ignore[arg-type]
    make_resumable(loader)
    return loader


@pytest.mark.parametrize(("samples", "batch"), [(8, 4), (10, 2)])
def test_a_place_among_other_batches_is_refused_by_name(samples: int, batch: int) -> None:
    loader = resumable(8, 2)
    batches = iter(loader)
    next(batches)
    same = resumable(8, 2)
    same.load_state_dict(loader.state_dict())
    assert [each.tolist() for each in same] == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(
        MismatchError, match=f"of 8 samples in batches of 2, and now there are {samples} in batches of {batch}"
    ):
        resumable(samples, batch).load_state_dict(loader.state_dict())


def test_between_two_epochs_the_batches_may_change() -> None:
    other = resumable(10, 5)
    other.load_state_dict({**resumable(8, 2).state_dict(), "began": None})
    assert len(list(other)) == 2
