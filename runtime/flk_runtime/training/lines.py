"""Lines of metrics: the means of their losses over the ranks, and what flk measures for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from flk_runtime.distributed import process_group
from flk_runtime.metrics import logging, mfu
from flk_runtime.shared.progress import ProgressPage
from flk_runtime.system.pytree import plain_value


class Line(NamedTuple):
    """A line of metrics."""

    time: float  # when it was made, in seconds since the epoch
    values: dict[str, Any]


class Recorder(Protocol):
    """What takes the lines of metrics of a run, on rank 0."""

    def record(self, lines: Sequence[Line]) -> None: ...
    def describe(self, hyperparameters: Mapping[str, Any]) -> None: ...


class Lines:
    """Prints lines of metrics on rank 0 and gives them to the recorders."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.recorders: list[Recorder] = []
        self._rank, self._world_size = rank, world_size

    def add(self, values: Mapping[str, Any], loss: float | None) -> None:
        """Print the line of a step. Its ``loss`` becomes the mean over the ranks that give one. Collective."""
        values = dict(values)
        if self._world_size > 1:
            mean = process_group.mean(0.0 if loss is None else loss, float(loss is not None))
            if loss is not None:
                values["loss"] = mean
        self.log(values)

    def log(self, values: Mapping[str, Any]) -> None:
        """Print a line of the script."""
        if self._rank:
            return
        line = Line(time.time(), _read(values))
        self.tell(line.values)
        for recorder in self.recorders:
            recorder.record([line])

    def tell(self, values: Mapping[str, Any]) -> None:
        """Print a line on rank 0 that is for readers of the log only."""
        if self._rank == 0:
            # One write: no line of another rank comes in between.
            sys.stdout.write(f"{logging.line(values)}\n")
            sys.stdout.flush()


class Metrics:
    """Throughput, utilisation and the shares of time since the latest line."""

    def __init__(self, device: torch.device, world_size: int, page: ProgressPage, warn: Callable[[str], None]) -> None:
        self._device = device
        self.utilisation = mfu.Meter(device, world_size, warn)
        self.shares = logging.Shares(page)
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


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with numbers and lists in the place of tensors, which the script may change."""
    return {name: _read(value) if isinstance(value, Mapping) else plain_value(value) for name, value in values.items()}
