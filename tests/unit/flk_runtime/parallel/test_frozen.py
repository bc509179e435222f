from __future__ import annotations

import pytest
import torch

from flk_runtime.checkpoint import Chunk
from flk_runtime.parallel.frozen import hash_of


def whole(tensor: torch.Tensor) -> Chunk:
    return Chunk(("weight",), tensor, tuple(tensor.shape), (0,) * tensor.dim())


def box(tensor: torch.Tensor, *ranges: tuple[int, int]) -> Chunk:
    for dimension, (begin, end) in enumerate(ranges):
        tensor = tensor.narrow(dimension, begin, end - begin)
    shape = (5, 6, 4)
    return Chunk(("weight",), tensor, shape[: len(ranges)], tuple(begin for begin, _ in ranges))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_the_hash_is_the_same_however_a_tensor_is_cut(dtype: torch.dtype) -> None:
    full = torch.arange(120, dtype=torch.float32).view(5, 6, 4).sin().mul(50).to(dtype)
    rows = [box(full, cut, (0, 6), (0, 4)) for cut in ((0, 2), (2, 5))]
    columns = [box(full, (0, 5), cut, (0, 4)) for cut in ((0, 1), (1, 4), (4, 6))]
    for cut in (rows, columns):
        assert sum(map(hash_of, cut)) % (1 << 64) == hash_of(whole(full))
    assert hash_of(whole(full.transpose(0, 2).contiguous().transpose(0, 2))) == hash_of(whole(full))


def test_the_hash_depends_on_values_and_on_their_places() -> None:
    full = torch.arange(24, dtype=torch.float32).view(4, 6)
    others = [full.flip(0), full.flip(1), full + 1, full.neg(), full.view(6, 4), full.to(torch.bfloat16)]
    changed = [full.clone() for _ in range(24)]
    for number, each in enumerate(changed):
        each.view(-1)[number] = torch.nextafter(each.view(-1)[number], torch.tensor(100.0))
    hashes = [hash_of(whole(each)) for each in (full, *others, *changed)]
    assert len(set(hashes)) == len(hashes) - 1  # the same values in another shape, which the checkpoint compares
    assert hash_of(whole(-full.double())) != hash_of(whole(full.double()))
    assert hash_of(whole(torch.tensor(3.0))) != hash_of(whole(torch.tensor(4.0)))
    assert hash_of(whole(torch.empty(0, 3))) == 0
