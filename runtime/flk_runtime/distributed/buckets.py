"""Buckets: many small tensors travel as few large ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

LIMIT = 25 << 20  # bytes; what DistributedDataParallel takes by default


def split(tensors: Iterable[torch.Tensor], limit: int | None = None) -> list[list[torch.Tensor]]:
    """``tensors`` in their order, by device and dtype, in groups of at most ``limit`` bytes (LIMIT) or one tensor."""
    limit = LIMIT if limit is None else limit
    done: list[list[torch.Tensor]] = []
    open_: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        key = tensor.device, tensor.dtype
        bucket, size = open_.get(key, ([], 0))
        more = tensor.numel() * tensor.element_size()
        if bucket and size + more > limit:
            bucket, size = [], 0
        if not bucket:
            done.append(bucket)
        bucket.append(tensor)
        open_[key] = bucket, size + more
    return done


def pack(bucket: Sequence[torch.Tensor], *, share: bool = False) -> torch.Tensor:
    """The elements of all tensors as one flat tensor. ``share``: a single contiguous tensor is not copied."""
    if share and len(bucket) == 1 and bucket[0].is_contiguous() and not bucket[0].is_conj() and not bucket[0].is_neg():
        return bucket[0].detach().view(-1)
    return torch.cat([tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in bucket])


@torch.no_grad()
def unpack(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    """Write the elements of ``flat`` back into the tensors."""
    if len(bucket) == 1 and flat.data_ptr() == bucket[0].data_ptr() and flat.dtype == bucket[0].dtype:
        return  # it was shared
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
