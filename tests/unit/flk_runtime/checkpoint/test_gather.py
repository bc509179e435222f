"""The pieces in which values travel at a restore from memory. `tests/local/test_gather.py` has several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from flk_runtime.checkpoint import gather


def item(*lengths: int) -> ReadItem:
    at = torch.Size([0] * len(lengths))
    index = MetadataIndex("x", at)
    return ReadItem(LoadItemType.TENSOR, index, at, index, at, torch.Size(lengths))


@pytest.mark.parametrize(
    ("items", "buckets"),
    [
        ([], []),
        ([item()], [[()]]),
        ([item(4), item(2, 2), item(4)], [[(4,), (2, 2)], [(4,)]]),
        ([item(5, 3), item(1)], [[(3, 3)], [(2, 3), (1,)]]),
        ([item(2, 40)], [[(1, 40)], [(1, 40)]]),
    ],
)
def test_a_bucket_is_bounded_or_one_row(
    monkeypatch: pytest.MonkeyPatch, items: list[ReadItem], buckets: list[Any]
) -> None:
    monkeypatch.setattr(gather, "PIECE", 9)
    assert [[tuple(piece.lengths) for piece in bucket] for bucket in gather._buckets(items, lambda _: 1)] == buckets
