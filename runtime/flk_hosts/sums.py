"""What metrics of torchmetrics have added up: sums of a rank, which are no part of the state_dict of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

_COUNT: Final = "_update_count"  # of a metric, which warns if it has added nothing up


def sums_of(module: nn.Module) -> dict[str, Any]:
    """What the metrics in a module have added up on this rank, by name."""
    return {name: getattr(metric, key) for name, metric, key in _sums(module)}


def set_sums(module: nn.Module, sums: Mapping[str, Any]) -> None:
    """Give the metrics in a module what they had added up."""
    for name, metric, key in _sums(module):
        if name in sums:
            setattr(metric, key, _on_device(sums[name], metric.device))
            metric._computed = None


def _sums(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    for name, metric in module.named_modules():
        if hasattr(metric, "add_state") and isinstance(defaults := getattr(metric, "_defaults", None), dict):
            for key in (*defaults, _COUNT):
                yield f"{name}.{key}" if name else key, metric, key


def _on_device(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [_on_device(each, device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
