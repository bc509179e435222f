"""Lines: the lines of metrics of a run, with the means of their losses over the ranks."""

from __future__ import annotations

import atexit
import math
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from flk_runtime.contract.metrics_line import AT
from flk_runtime.distributed import process_group
from flk_runtime.metrics import logging
from flk_runtime.system.pytree import plain_value

_AT_ONCE: Final = 10.0  # seconds after the first line, in which no line waits
_RARE: Final = 1.0  # lines in a second, up to which no line waits
_LONGEST: Final = 2.0  # seconds that a line waits for the mean of its loss, if lines come as fast as before
_MOST: Final = 16  # lines that wait: steps may become slower


class Line(NamedTuple):
    """A line of metrics."""

    time: float  # when it was made, in seconds since the epoch
    values: dict[str, Any]
    place: int | None  # of its loss among those that wait; None: it has none to be averaged
    waits: bool

    @property
    def printed(self) -> str:
        """The line as JSON. One that has waited says when it was made."""
        return logging.line({**self.values, AT: round(self.time, 3)} if self.waits else self.values)


class Recorder(Protocol):
    """What takes the lines of metrics of a run, on rank 0."""

    def record(self, lines: Sequence[Line]) -> None: ...
    def describe(self, hyperparameters: Mapping[str, Any]) -> None: ...


class Lines:
    """Prints lines of metrics on rank 0 and gives them to the recorders.

    Where lines come faster than one in a second, one collective forms the means of all lines of two seconds, since one
    of many numbers costs as much as one of a single number. In each, rank 0 says how many lines the next one is for: so
    all ranks know without asking when it is due.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.recorders: list[Recorder] = []
        self._rank, self._world_size = rank, world_size
        self._waiting: list[Line] = []  # on rank 0
        self._losses = array("d")  # of this rank: for each line that waits its loss times the weight, and the weight
        self._next = 1  # lines of the next collective
        self._began = self._latest = 0.0  # times of the first line and of the latest collective

    def add(self, values: Mapping[str, Any], loss: float | None) -> None:
        """Add the line of a step. Its ``loss`` becomes the mean over the ranks that give one. Collective."""
        self._began = self._began or time.monotonic()
        if self._rank == 0:
            place = None if loss is None else len(self._losses)
            self._wait(values, place)
        self._losses.extend((0.0, 0.0) if loss is None else (loss, 1.0))
        if len(self._losses) >= 2 * self._next:
            self.flush()

    def log(self, values: Mapping[str, Any]) -> None:
        """Add a line of the script. It comes after the lines of the steps before it."""
        if self._rank == 0:
            self._wait(values, None)
            if not self._losses:
                self._write()

    def flush(self) -> None:
        """Print the lines that wait. Collective if there are any."""
        if not self._losses:
            return
        numbers = array("d", (float(self._due_next()), *self._losses))
        sums = process_group.total(numbers) if self._world_size > 1 else numbers
        self._losses = array("d")
        self._next = int(sums[0])
        if self._rank == 0:
            for line in self._waiting:
                if line.place is not None:
                    total, weight = sums[1 + line.place : 3 + line.place]
                    line.values["loss"] = total / weight if weight else math.nan
            self._write()

    def close(self) -> None:
        """Print the lines that wait, with the losses of this rank alone, since others may have ended."""
        for line in self._waiting:
            if line.place is not None:
                line.values.update(loss=self._losses[line.place], ranks=1)
        self._losses = array("d")
        self._write(means=False)

    def _wait(self, values: Mapping[str, Any], place: int | None) -> None:
        if not self._waiting:
            atexit.register(self.close)  # after the recorders, which are closed after it
        waits = self._next > 1 if place is not None else bool(self._losses)
        self._waiting.append(Line(time.time(), _read(values), place, waits))

    def _write(self, *, means: bool = True) -> None:
        """Print all lines, and give them to the recorders; without ``means`` only those that need none."""
        if not self._waiting:
            return
        atexit.unregister(self.close)
        lines, self._waiting = self._waiting, []
        # One write: no line of another rank comes in between.
        sys.stdout.write("".join(f"{line.printed}\n" for line in lines))
        sys.stdout.flush()
        for each in self.recorders:
            each.record([line for line in lines if means or line.place is None])

    def _due_next(self) -> int:
        """The number of lines of the next collective, on rank 0; 0 on others."""
        now, count = time.monotonic(), len(self._losses) // 2
        seconds, self._latest = now - self._latest, now
        if self._rank:
            return 0
        if self._world_size == 1 or now - self._began < _AT_ONCE:
            return 1
        rate = count / max(seconds, 1e-9)
        return 1 if rate <= _RARE else min(_MOST, round(rate * _LONGEST))


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with numbers and lists in the place of tensors, which the script may change."""
    return {name: _read(each) if isinstance(each, Mapping) else plain_value(each) for name, each in values.items()}
