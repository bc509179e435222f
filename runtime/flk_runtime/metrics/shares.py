"""Shares of a rank's time: in communication, and in waiting for data."""

from __future__ import annotations

import time

from flk_runtime.shared.progress import ProgressPage


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
