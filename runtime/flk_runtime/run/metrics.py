"""Metrics: the measurements of a run between two lines of metrics."""

from __future__ import annotations

from typing import Any

import torch

from flk_runtime.metrics import logging, mfu
from flk_runtime.metrics.shares import Shares
from flk_runtime.run.context import RunContext


class Metrics:
    """Throughput, utilisation and the shares of time since the latest line."""

    def __init__(self, context: RunContext) -> None:
        self._device = context.options.device
        self.utilisation = mfu.Meter(context.options.device, context.world_size, context.say)
        self.shares = Shares(context.page)
        self.throughput = logging.Throughput()

    def read(self) -> dict[str, Any]:
        """The values of a line, without the loss."""
        line: dict[str, Any] = self.throughput.read()
        utilisation = self.utilisation.read(mark=True)
        if utilisation is not None:
            line["mfu"] = round(utilisation, 4)
        return line | self.shares.read()

    def read_utilisation(self) -> float | None:
        """Model FLOPs utilisation since the latest line, from 0 to 1. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self.utilisation.read()
