"""Lines of metrics: the means of their losses over the ranks, and what flk measures for them."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from flk_runtime.distributed import process_group
from flk_runtime.shared.progress import ProgressPage
from flk_runtime.system import mfu
from flk_runtime.system.pytree import map_leaves, plain_value

_ENCODER: Final = json.JSONEncoder(default=str, allow_nan=False)


class Line(NamedTuple):
    """A line of metrics."""

    time: float  # when it was made, in seconds since the epoch
    values: dict[str, Any]


class Recorder(Protocol):
    """What takes the lines of metrics of a run, on rank 0."""

    def record(self, lines: Sequence[Line]) -> None:
        """Take lines, in their order."""

    def describe(self, hyperparameters: Mapping[str, Any]) -> None:
        """Take what describes the run. Later values of a name count."""


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
        """Print a line of the script. All ranks gather what is sharded, such as a norm that torch has clipped to."""
        # Other containers may be of a kind that cannot be made again, such as os.environ.
        values = map_leaves(dict(values), process_group.full, lambda value: type(value) not in (dict, list, tuple))
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
            sys.stdout.write(f"{json_line(values)}\n")
            sys.stdout.flush()


class Metrics:
    """What a line of metrics says besides the loss: throughput, utilisation, and shares of the time since the latest
    line, from 0 to 1.

    Measuring it adds no synchronization to a step. Communication is the share of the observer's samples, a few per
    second, in which a collective of this rank had begun and not ended; computation may go on beside it. Without flk's
    launcher there is no observer.
    """

    def __init__(self, device: torch.device, world_size: int, page: ProgressPage, warn: Callable[[str], None]) -> None:
        self.utilisation = mfu.Meter(device, world_size, warn)
        self.samples = self.tokens = 0
        """Those of all ranks together that were trained on since the latest line: the caller adds them."""
        self.waited = 0.0
        """The seconds in which the training loop waited for a batch: the caller adds them."""
        self._device, self._page = device, page
        self._looks, self._pending = page.samples, page.pending_samples
        self._communication = 0.0
        self._since = time.perf_counter()

    def read(self) -> dict[str, Any]:
        """The values of a line. Without a new look of the observer, ``comm`` is the latest one."""
        now, page = time.perf_counter(), self._page
        seconds = max(now - self._since, 1e-9)
        counts = {"samples_per_s": self.samples, "tokens_per_s": self.tokens}
        line: dict[str, Any] = {name: round(count / seconds, 1) for name, count in counts.items() if count}
        utilisation = self.utilisation.read(mark=True)
        if utilisation is not None:
            line["mfu"] = round(utilisation, 4)
        looks, pending = page.samples, page.pending_samples
        if looks != self._looks:
            self._communication = (pending - self._pending) / (looks - self._looks)
            self._looks, self._pending = looks, pending
        if page.launched and not page.untold:
            line["comm"] = round(self._communication, 2)
        line["data_wait"] = page.data_wait = round(min(1.0, self.waited / seconds), 2)
        self.samples, self.tokens, self.waited, self._since = 0, 0, 0.0, now
        return line

    def read_utilisation(self) -> float | None:
        """Model FLOPs utilisation since the latest line, from 0 to 1. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self.utilisation.read()


def json_line(values: Mapping[str, Any]) -> str:
    """``values`` as one line of JSON (RFC 8259).

    Tensors and arrays of one element become numbers (this waits for the device), larger ones lists. NaN and the
    infinities, which JSON does not have, become the strings "nan", "inf" and "-inf"; other objects become their str().
    """
    return _ENCODER.encode({name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    value = plain_value(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with numbers and lists in the place of tensors, which the script may change."""
    return {name: _read(value) if isinstance(value, Mapping) else plain_value(value) for name, value in values.items()}
