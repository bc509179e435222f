"""Paired measurements: run both sides of a comparison in alternating order, and report their ratio against a goal.

Each benchmark measures flk and a named peer in the same rounds. The ratio is taken round by round, so that the load of
the machine, which changes over minutes, affects both sides of a ratio alike. The result is the median of these ratios
with a 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")

CONFIDENCE: Final = 0.95
SKIPPED: Final = 77  # exit code of a benchmark that cannot run on this machine


class Verdict(str, enum.Enum):
    """Whether a result meets its goal."""

    MET = "met"  # the whole interval meets it
    UNDECIDED_MEETS = "undecided, the median meets it"
    UNDECIDED_MISSES = "undecided, the median misses it"
    MISSED = "missed"  # the whole interval misses it
    NOT_JUDGED = "not judged: too few rounds"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Goal:
    """A limit for a ratio, which must be at most or at least so large, or must not differ from 1 by a larger factor."""

    limit: float
    better: str = "lower"  # or "higher", or "closer to 1"

    def is_met(self, ratio: float) -> bool:
        if self.better == "closer to 1":
            return 1 / self.limit <= ratio <= self.limit
        return ratio >= self.limit if self.better == "higher" else ratio <= self.limit

    def __str__(self) -> str:
        words = {"lower": "at most", "higher": "at least", "closer to 1": "within a factor of"}
        return f"{words[self.better]} {self.limit:g}"


def at_most(limit: float) -> Goal:
    """A goal for ratios of times and memory, where lower is better."""
    return Goal(limit)


def at_least(limit: float) -> Goal:
    """A goal for ratios of rates, where higher is better."""
    return Goal(limit, better="higher")


def within_factor(limit: float) -> Goal:
    """A goal for predictions, which may be too high or too low."""
    return Goal(limit, better="closer to 1")


@dataclass(frozen=True)
class Interval:
    """A confidence interval for a median. ``coverage`` is the probability that it holds the true median."""

    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest symmetric interval between order statistics that holds the median with at least ``confidence``.

    The number of independent ``values`` below the true median is binomial with p = 1/2, whatever their distribution
    (David and Nagaraja, Order Statistics, section 7.1). Fewer than 6 values cannot give 95 %: the interval is then
    their whole range, with the coverage that this has. Raises ValueError if there are no values.
    """
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        raise ValueError("a median needs at least one value")
    outside = 0  # values left out at each end
    while outside + 1 <= (count - 1) // 2 and _coverage(count, outside + 1) >= confidence:
        outside += 1
    return Interval(ordered[outside], ordered[count - 1 - outside], _coverage(count, outside))


def _coverage(count: int, outside: int) -> float:
    """The probability that the median lies between the values at positions ``outside`` and ``-1 - outside``."""
    tail = sum(math.comb(count, below) for below in range(outside + 1))
    return float(1 - 2 * tail / 2**count)


def share_interval(hits: int, count: int) -> Interval:
    """Wilson's interval for the probability of a hit, of which there were ``hits`` in ``count`` trials.

    It takes them for independent. Trials that share a kind, a job or a machine are not: they fail together, so that the
    true probability is outside of this interval more often than it says.
    """
    quantile = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, spread = hits / count, quantile**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return Interval(max(0.0, middle - half), min(1.0, middle + half), CONFIDENCE)


def rate_bound(events: int, duration: float) -> float:
    """The rate above which so few independent ``events`` in a ``duration`` have a probability of 5 % at most.

    Without an event it is 3.0 / ``duration``.
    """

    def probability(mean: float) -> float:
        return sum(math.exp(-mean) * mean**number / math.factorial(number) for number in range(events + 1))

    low, high = 0.0, 10.0 + 3.0 * events
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if probability(middle) < 1 - CONFIDENCE else (middle, high)
    return high / duration


@dataclass(frozen=True)
class Result:
    """The comparison of one quantity: the medians of both sides, the median of their ratios, and its goal."""

    benchmark: str
    what: str
    unit: str
    ours: float  # flk's median
    theirs: float  # the peer's median
    ratio: float  # median of the ratios of the rounds, flk's value divided by the peer's
    interval: Interval | None  # None: the values are computed, and the same in every run
    rounds: int
    goal: Goal

    @classmethod
    def of(
        cls, benchmark: str, what: str, ours: Sequence[float], theirs: Sequence[float], goal: Goal, unit: str
    ) -> Result:
        """Compare the values of the same rounds. Raises ValueError where the numbers of rounds differ or are 0."""
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        interval = median_interval(ratios)
        medians = statistics.median(ours), statistics.median(theirs)
        return cls(benchmark, what, unit, *medians, statistics.median(ratios), interval, len(ratios), goal)

    @classmethod
    def computed(cls, benchmark: str, what: str, ours: float, theirs: float, goal: Goal, unit: str) -> Result:
        """Compare two numbers that are the same in every run: they have no interval and need no rounds."""
        return cls(benchmark, what, unit, ours, theirs, ours / theirs, None, 1, goal)

    @property
    def verdict(self) -> Verdict:
        """Whether the goal is met, by the whole interval; if the goal is inside it, the median is said."""
        if self.interval is None:
            return Verdict.MET if self.goal.is_met(self.ratio) else Verdict.MISSED
        if self.interval.coverage < CONFIDENCE:
            return Verdict.NOT_JUDGED
        ends = {self.goal.is_met(end) for end in (self.interval.low, self.interval.high)}
        if len(ends) == 1:
            return Verdict.MET if ends.pop() else Verdict.MISSED
        return Verdict.UNDECIDED_MEETS if self.goal.is_met(self.ratio) else Verdict.UNDECIDED_MISSES

    @property
    def span(self) -> str:
        """The interval; without one how many rounds or trials there were, or that the result is computed."""
        if self.interval is None:
            return "computed"
        if self.interval.coverage < CONFIDENCE:
            what = "trial" if self.unit == "trials" else "round"
            return f"{self.rounds} {what}{'s' if self.rounds > 1 else ''}"
        return f"{self.interval.low:.3f} to {self.interval.high:.3f}"

    def __str__(self) -> str:
        return (
            f"ratio {self.what} {self.ratio:.3f} ({self.span}) goal {self.goal} ({self.goal.better} is better): "
            f"{self.verdict}"
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        fields: dict[str, Any] = json.loads(text)
        fields["interval"] = Interval(**fields["interval"]) if fields["interval"] else None
        fields["goal"] = Goal(**fields["goal"])
        return cls(**fields)


def alternate(
    cases: Mapping[str, Callable[[], T]], rounds: int, *, warmup: int = 0, show: Callable[[T], str] | None = str
) -> dict[str, list[T]]:
    """Measure each case once per round, in reversed order every other round. Returns each case's values by round.

    The values of ``warmup`` rounds before are dropped. ``show`` formats a value for the progress on stderr.
    """
    values: dict[str, list[T]] = {name: [] for name in cases}
    for number in range(-warmup, rounds):
        order = list(cases) if number % 2 == 0 else list(cases)[::-1]
        found = {name: cases[name]() for name in order}
        if number < 0:
            continue
        for name in cases:
            values[name].append(found[name])
        if show:
            progress(f"round {number + 1} of {rounds}: " + ", ".join(f"{name} {show(found[name])}" for name in cases))
    return values


def progress(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def skip(reason: str) -> NoReturn:
    """End a benchmark that cannot run here with exit code 77, and print the reason."""
    progress(f"skipped: {reason}")
    sys.exit(SKIPPED)


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A command-line parser with the options of every benchmark. ``rounds`` is the default of --rounds."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=positive, default=rounds, help=f"measurements of each side (default {rounds})")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE, as lines of JSON")
    return made


def positive(text: str) -> int:
    """A number of an option that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (is {number})")
    return number


def environment() -> str:
    """The commit, the load average, and the versions that a result depends on, as one line."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"commit {_commit()}, load average {load}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, torch {_version('torch')}"
    )


def _commit() -> str:
    """The commit, with "-modified" if files that no page of the documentation is differ from it."""
    root = Path(__file__).parents[1]
    asked = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", ".", ":(exclude)docs"])
    if not shutil.which("git"):
        return "unknown"
    commit, modified = (
        subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip() for words in asked
    )
    return f"{commit}{'-modified' if modified else ''}" or "unknown"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


class Report:
    """The results of one benchmark: prints each, and gives the exit code at the end."""

    def __init__(self, benchmark: str, arguments: argparse.Namespace) -> None:
        self.benchmark = benchmark
        self.results: list[Result] = []
        self._file: Path | None = arguments.json
        print(environment(), flush=True)

    def compare(self, what: str, ours: Sequence[float], theirs: Sequence[float], goal: Goal, unit: str) -> None:
        """Add the ratio of flk's values to the peer's. ``what`` names both, as in "flk --version / kubectl version"."""
        self._add(Result.of(self.benchmark, what, ours, theirs, goal, unit))

    def measure(
        self,
        what: str,
        cases: Mapping[str, Callable[[], float]],
        rounds: int,
        goal: Goal,
        unit: str,
        *,
        warmup: int = 0,
        digits: int = 2,
    ) -> None:
        """Measure flk's case, the first one, and those of its peers with `alternate`; add the ratio to each of them.

        ``what`` is measured, to which the names of both cases are added. ``digits`` are those of the progress.
        """
        values = alternate(cases, rounds, warmup=warmup, show=f"{{:.{digits}f}} {unit}".format)
        ours, *peers = cases
        for peer in peers:
            self.compare(f"{what}, {ours} / {peer}", values[ours], values[peer], goal, unit)

    def compute(self, what: str, ours: float, theirs: float, goal: Goal, unit: str) -> None:
        """Add the ratio of two numbers that are the same in every run."""
        self._add(Result.computed(self.benchmark, what, ours, theirs, goal, unit))

    def share(self, what: str, hits: int, count: int, goal: Goal) -> None:
        """Add the share of trials that were hits. It is not judged if so few could not meet the goal."""
        found = share_interval(hits, count)
        if not goal.is_met(share_interval(count, count).low):
            found = dataclasses.replace(found, coverage=0.0)
        self._add(Result(self.benchmark, what, "trials", hits, count, hits / count, found, count, goal))

    def rate(self, what: str, events: int, hours: float, enough: float, goal: Goal) -> None:
        """Add the number of events per hour, and print the bound of their true rate.

        It is not judged in fewer hours than ``enough``.
        """
        print(
            f"{what}: {events} in {hours:.2f} hours, so that the true rate is at most {rate_bound(events, hours):.2g}"
        )
        unknown = None if hours >= enough else Interval(0.0, rate_bound(events, hours), coverage=0.0)
        found = Result.computed(self.benchmark, what, events, hours, goal, "events / hours")
        self._add(dataclasses.replace(found, interval=unknown))

    def _add(self, result: Result) -> None:
        self.results.append(result)
        unit = result.unit
        print(f"median {result.what}: {result.ours:.4g} {unit} / {result.theirs:.4g} {unit}")

    def finish(self) -> int:
        """Print the ratios. Returns 1 if a goal is missed, else 0."""
        if any(result.verdict is Verdict.NOT_JUDGED for result in self.results):
            print("too few rounds for a 95 % interval: the brackets hold the whole range")
        for result in self.results:
            print(result)
        if self._file:
            self._file.write_text("".join(f"{result.to_json()}\n" for result in self.results))
        return int(any(result.verdict is Verdict.MISSED for result in self.results))
