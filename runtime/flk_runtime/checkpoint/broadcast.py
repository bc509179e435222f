"""Broadcast of the newest checkpoint: rank 0 reads it, and large tensors reach the other ranks when they ask.

So the ranks need not share a folder, and no rank but 0 holds the whole checkpoint in memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flk_runtime.checkpoint.storage import CheckpointFolder
from flk_runtime.distributed import process_group
from flk_runtime.system.pytree import map_leaves

LARGE = 1 << 12  # bytes; a tensor of this size or more is broadcast only when it is fetched


class LazyBroadcastTensor:
    """A large tensor of a checkpoint that rank 0 holds and that all ranks together `fetch`.

    ``tensor`` is on the CPU on rank 0, and on the meta device elsewhere.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = tensor.shape

    def to_meta(self) -> torch.Tensor:
        """The shape and dtype, as a tensor on the meta device."""
        return self._tensor.to("meta")

    def fetch(self) -> torch.Tensor:
        """The full tensor, on the CPU of every rank. Collective."""
        return process_group.broadcast_tensor(self._tensor)


def broadcast_newest(folder: CheckpointFolder, warn: Callable[[str], None]) -> tuple[str, dict[str, Any]] | None:
    """The path and content of rank 0's newest checkpoint, on every rank; None if there is none. Collective.

    Tensors in ``content["objects"]`` of `LARGE` bytes or more are `LazyBroadcastTensor`. Raises CheckpointError on all
    ranks where rank 0 cannot use the folder.
    """
    read: list[dict[str, Any]] = []  # on rank 0

    def read_newest() -> str | None:
        folder.prepare()
        newest: tuple[Path, dict[str, Any]] | None = folder.read_newest(warn)
        if newest is None:
            return None
        read.append(newest[1])
        return str(newest[0])

    path = process_group.on_main(read_newest)
    if path is None:
        return None
    if read:
        content = read[0]
        content["objects"] = map_leaves(content["objects"], _make_lazy)
        without_large = io.BytesIO()
        torch.save({**content, "objects": map_leaves(content["objects"], _to_meta)}, without_large)
        process_group.broadcast_bytes(without_large.getvalue())
    else:
        content = torch.load(io.BytesIO(process_group.broadcast_bytes(None)), weights_only=True)
        content["objects"] = map_leaves(content["objects"], _from_meta)
    return path, content


def fetch(tree: Any) -> Any:
    """``tree`` with the full tensor in the place of each `LazyBroadcastTensor`. Collective."""
    return map_leaves(tree, lambda leaf: leaf.fetch() if isinstance(leaf, LazyBroadcastTensor) else leaf)


def _make_lazy(leaf: Any) -> Any:
    large = isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() >= LARGE
    return LazyBroadcastTensor(leaf) if large else leaf


def _to_meta(leaf: Any) -> Any:
    return leaf.to_meta() if isinstance(leaf, LazyBroadcastTensor) else leaf


def _from_meta(leaf: Any) -> Any:
    return LazyBroadcastTensor(leaf) if isinstance(leaf, torch.Tensor) and leaf.is_meta else leaf
