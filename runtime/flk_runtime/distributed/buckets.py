"""Buckets: small tensors of one device and dtype are sent as one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

BUCKET_BYTES = 25 << 20  # the default of DistributedDataParallel (bucket_cap_mb)


def split(tensors: Iterable[torch.Tensor], limit: int | None = None) -> list[list[torch.Tensor]]:
    """Group ``tensors`` by device and dtype, in their order, into buckets of at most ``limit`` bytes.

    ``limit`` is BUCKET_BYTES by default; a larger tensor has a bucket of its own.
    """
    limit = BUCKET_BYTES if limit is None else limit
    done: list[list[torch.Tensor]] = []
    current: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        key = tensor.device, tensor.dtype
        bucket, size = current.get(key, ([], 0))
        added = tensor.numel() * tensor.element_size()
        if bucket and size + added > limit:
            bucket, size = [], 0
        if not bucket:
            done.append(bucket)
        bucket.append(tensor)
        current[key] = bucket, size + added
    return done


def pack(bucket: Sequence[torch.Tensor], *, share: bool = False) -> torch.Tensor:
    """The elements of all tensors of a bucket as one flat tensor of their dtype, of shape (sum of numel,).

    With ``share``, a single contiguous tensor is not copied: the result is a view of it.
    """
    if share and len(bucket) == 1 and bucket[0].is_contiguous() and not bucket[0].is_conj() and not bucket[0].is_neg():
        return bucket[0].detach().view(-1)
    return torch.cat([tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in bucket])


@torch.no_grad()
def unpack(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    """Copy the elements of ``flat``, as `pack` made it, into the tensors of the bucket."""
    if len(bucket) == 1 and flat.data_ptr() == bucket[0].data_ptr() and flat.dtype == bucket[0].dtype:
        return  # a view of the tensor
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
