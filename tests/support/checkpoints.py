"""Checkpoints as torch itself reads them, without flk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def load_with_torch(folder: Path) -> dict[str, Any]:
    """All that a checkpoint in torch.distributed.checkpoint's format holds, with full tensors."""
    whole = folder.with_name(f".{folder.name}.whole")
    dcp_to_torch_save(folder, whole)
    try:
        content: dict[str, Any] = torch.load(whole, weights_only=True)
    finally:
        whole.unlink()
    return content
