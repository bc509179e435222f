"""Sink: what one of the services and formats does with the metrics of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from flk_runtime.system.pytree import plain_value


class Row(NamedTuple):
    """The numbers of one line of metrics."""

    step: int
    time: float  # seconds since the epoch
    values: Mapping[str, float]


@dataclass
class RunInfo:
    """The run to which the rows of a job belong, through all its attempts."""

    id: str
    name: str
    group: str  # of the runs of a job: its workers have one each
    resumed: int = 0  # the step after which this process began
    settings: dict[str, str | int] = field(default_factory=dict)
    """What flk knows of the run, which may differ between attempts: job, code, world size."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """What the script has given: numbers, texts and truth values."""

    @property
    def described(self) -> dict[str, Any]:
        """The settings, with a prefix before their names, and the hyperparameters."""
        return {f"flk.{name}": value for name, value in self.settings.items()} | self.hyperparameters


class Sink(Protocol):
    """Where rows go. All methods may raise any exception, after which `open` is called before anything else."""

    title: str  # in messages

    def open(self) -> None:
        """Begin the run, or go on with it. It is called before each attempt to write after a failure, too."""

    def describe(self) -> None:
        """Write the settings and the hyperparameters of the run, as they are now."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows. Those of an earlier call may return."""

    def close(self, ended: str) -> None:
        """End the run. ``ended`` is finished, stopped (it goes on later) or failed."""


class Written:
    """The newest step of each name in a run that is resumed. A step that is done again is not written again."""

    def __init__(self, steps: Mapping[str, int]) -> None:
        self._steps = dict(steps)

    def missing(self, rows: Sequence[Row]) -> list[Row]:
        """The rows without the values that the run has already."""
        kept = [
            Row(row.step, row.time, {k: v for k, v in row.values.items() if row.step > self._steps.get(k, -1)})
            for row in rows
        ]
        return [row for row in kept if row.values]

    def add(self, rows: Sequence[Row]) -> None:
        """Note that rows are written."""
        for row in rows:
            self._steps |= dict.fromkeys(row.values, row.step)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among ``values``, also those in mappings, whose names are joined by a slash.

    Tensors and arrays of one element are numbers. Everything else, such as texts and lists, is left out.
    """
    return {name: float(value) for name, value in flat(values) if isinstance(value, int | float)}


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values, also those in mappings, with names like ``optimizer/lr``."""
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}/")
            continue
        yield path, plain_value(value)
