"""Checkpoints with one model, and as torch itself reads them, without flk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from flk_runtime.checkpoint.save import Saver
from flk_runtime.checkpoint.state import chunks_of
from flk_runtime.checkpoint.storage import open_destination


def store_model(place: str, state: Mapping[str, torch.Tensor]) -> None:
    """Make a checkpoint of step 0 in this folder or bucket, which holds a model of this state."""
    destination = open_destination(place)
    destination.prepare()
    saver = Saver(destination, None, keep=2, metadata={}, timeout=60.0, on_saved=lambda step: None, warn=print)
    chunks = [chunk for name, value in state.items() for chunk in chunks_of(("model", name), value)]
    saver.save(0, chunks, {"steps": 0, "objects": {"model": {}}, "own": {}, "random": None, "place": place})
    saver.wait()


def load_with_torch(folder: Path) -> dict[str, Any]:
    """All that a checkpoint in torch.distributed.checkpoint's format holds, with full tensors."""
    whole = folder.with_name(f".{folder.name}.whole")
    dcp_to_torch_save(folder, whole)
    try:
        content: dict[str, Any] = torch.load(whole, weights_only=True)
    finally:
        whole.unlink()
    return content
