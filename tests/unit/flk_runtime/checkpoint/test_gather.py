"""The pieces in which values travel at a restore from memory. `tests/local/test_gather.py` has several ranks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from flk_runtime.checkpoint.gather import _buckets, _overlap
from flk_runtime.checkpoint.pod_exchange import packed, unpacked
from flk_runtime.checkpoint.state import Chunk


@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([50], [(0, 1)]),
        ([4, 4, 4], [(0, 2), (2, 3)]),
        ([4, 50, 4], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_bucket_is_bounded_or_one_box(sizes: list[int], cuts: list[tuple[int, int]]) -> None:
    assert _buckets(sizes, 10) == cuts


class Stranger:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('what travels was executed')",)


def test_values_travel_as_bytes_and_run_no_code() -> None:
    values = {"flk.0": b"a\nb", "é\n": b"", "header": pickle.dumps([1])}
    assert unpacked(bytearray(packed(values))) == values
    assert unpacked(packed({})) == {}
    with pytest.raises(ValueError, match="decode"):
        unpacked(pickle.dumps(Stranger()))


def test_boxes_overlap_in_all_dimensions() -> None:
    chunk = Chunk(("x",), torch.zeros(4, 3), (9, 9), (2, 5))
    assert _overlap(chunk, (0, 0), (9, 9)) == 12
    assert _overlap(chunk, (5, 6), (4, 1)) == 1
    assert _overlap(chunk, (6, 0), (3, 9)) == 0
    assert _overlap(Chunk(("x",), torch.zeros(()), (), ()), (), ()) == 1
