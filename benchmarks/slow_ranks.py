"""Measure whether flk names ranks that have become slower by a factor of 1.3, and how soon.

    python benchmarks/slow_ranks.py [--rounds 80] [--at-once 4]

Each round has two trainings of two launchers with two ranks each, whose steps take a second. In one of them something
becomes slower after some steps, by a factor of 1.3: the work of a random rank, the making of its data, or the work of
both ranks of a random launcher, as on a slow node; the three ways come in turn. In the other one nothing does. Several
trainings run at once, and share this machine's processors. All settings are flk's defaults.
Goals: in 0.95 of the slower trainings just these ranks are named, within 100 steps, with their data if it is that; in
the others no rank is named.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import measure

SCRIPT = Path(__file__).with_name("slowed.py")
PODS, PROCESSES = 2, 2
FIRST, WITHIN = 20, 100  # steps before it becomes slower, and steps after that within which it is to be named
WAYS = ("work", "data", "node")
_STEP = re.compile(r'^\[rank 0\] \{"step": (\d+)')
_SLOW = re.compile(r"^\[pod 0\] rank (\d+) in \S+ on \S+ is slow: (.*)")


@dataclass(frozen=True)
class Case:
    """A training: what becomes slower in it, and in which ranks. Without ranks nothing does."""

    way: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What was said of a training: each time that a rank was said to be slow, its step, the rank and the reason."""

    case: Case
    said: list[tuple[int, int, str]]

    @property
    def is_right(self) -> bool:
        """Whether just the ranks that are slow were named, soon, with their data if it is that, and no other one."""
        of_data = [" data " in reason for _, _, reason in self.said]
        soon = all(FIRST <= step <= FIRST + WITHIN for step, _, _ in self.said)
        named = tuple(sorted(rank for _, rank, _ in self.said))
        return named == self.case.ranks and soon and all(each == (self.case.way == "data") for each in of_data)


def cases(rounds: int, draw: random.Random) -> Iterator[Case]:
    """The trainings of all rounds."""
    for number in range(rounds):
        way = WAYS[number % len(WAYS)]
        pod = draw.randrange(PODS) * PROCESSES
        ranks = range(pod, pod + PROCESSES)
        yield Case(way, tuple(ranks) if way == "node" else (draw.choice(ranks),))
        yield Case(way, ())


def train(case: Case, number: int) -> Outcome:
    """Run one training, and read what its launchers say."""
    way = "data" if case.way == "data" else "work"
    script = [str(SCRIPT), "--", way, str(FIRST), str(FIRST + WITHIN), *map(str, case.ranks)]
    size = ["--replicas", str(PODS), "--processes", str(PROCESSES), "--name", f"slow-{number}"]
    said, step = [], 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flk", "run", *size, *script]
        job = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in job.stdout or ():
            if match := _STEP.match(line):
                step = int(match[1])
            elif match := _SLOW.match(line):
                said.append((step, int(match[1]), match[2]))
        if job.wait():
            raise RuntimeError(f"the training of {case} ended with exit code {job.returncode}")
    outcome = Outcome(case, said)
    measure.progress(f"{'right' if outcome.is_right else 'WRONG'}: {outcome}")
    return outcome


def main() -> int:
    parser = measure.parser(__doc__, rounds=80)
    parser.add_argument("--at-once", type=int, default=4, help="trainings that run at the same time")
    options = parser.parse_args()
    report = measure.Report("slow_ranks", options)
    with ThreadPoolExecutor(options.at_once) as pool:
        outcomes = list(pool.map(train, cases(options.rounds, random.Random(1)), range(2 * options.rounds)))
    slower, others = ([each for each in outcomes if bool(each.case.ranks) is of] for of in (True, False))
    right = sum(each.is_right for each in slower)
    what = f"slow-downs of 1.3 times that are named rightly within {WITHIN} steps"
    report.share(what, right, len(slower), measure.at_least(0.95))
    alarms = sum(not each.is_right for each in others)
    what = "trainings without a slow rank in which one is named"
    report.compute(what, alarms, len(others), measure.at_most(0), "trainings")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
