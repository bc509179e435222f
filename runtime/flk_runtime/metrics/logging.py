"""Metrics as lines of JSON, one object per line, and what a line measures: throughput, and shares of the time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any, Final

from flk_runtime.shared.progress import ProgressPage
from flk_runtime.system.pytree import plain_value

_ENCODER: Final = json.JSONEncoder(default=str, allow_nan=False)


def line(values: Mapping[str, Any]) -> str:
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


class Throughput:
    """Samples and tokens per second between two readings."""

    def __init__(self) -> None:
        self.samples = self.tokens = 0
        """Those of all ranks together that were trained on since the last reading: the caller adds them."""
        self._since = time.perf_counter()

    def read(self) -> dict[str, float]:
        """``samples_per_s`` and ``tokens_per_s`` since the last reading, as far as any were added."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        counts = {"samples_per_s": self.samples, "tokens_per_s": self.tokens}
        self.samples, self.tokens, self._since = 0, 0, now
        return {name: round(count / seconds, 1) for name, count in counts.items() if count}


class Shares:
    """Shares of the time between two readings, from 0 to 1. Measuring them adds no synchronization to a step.

    Communication is the share of the observer's samples, a few per second, in which a collective of this rank had begun
    and not ended; computation may go on beside it. Without flk's launcher there is no observer.
    """

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        self._samples, self._pending = page.samples, page.pending_samples
        self._communication = 0.0
        self._waited = 0.0
        self._since = time.perf_counter()

    def add_wait(self, seconds: float) -> None:
        """Add time in which the training loop waited for a batch."""
        self._waited += seconds

    def read(self) -> dict[str, float]:
        """``comm``, where it is measured, and ``data_wait``. Without a new sample, ``comm`` is the latest one."""
        now, shares = time.perf_counter(), {}
        if (samples := self._page.samples) != self._samples:
            pending = self._page.pending_samples
            self._communication = (pending - self._pending) / (samples - self._samples)
            self._samples, self._pending = samples, pending
        if self._page.launched and not self._page.untold:
            shares["comm"] = round(self._communication, 2)
        shares["data_wait"] = self._page.data_wait = round(min(1.0, self._waited / max(now - self._since, 1e-9)), 2)
        self._waited, self._since = 0.0, now
        return shares
