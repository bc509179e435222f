"""Measure the steps per second of the GPT example under flk's launcher and under torchrun.

    python benchmarks/overhead.py [--rounds 16] [--ranks 2] [--steps 150]

Both start the same script with the same ranks on this machine. The rate is taken from the metrics that rank 0 prints,
after the first 20 steps, so neither the start nor the imports are in it. Goal: at least 0.98 of torchrun's rate.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import launch
import measure
from example import EXAMPLE, WARM_UP, rate, step_times

GOAL = measure.at_least(0.98)


def steps_per_second(launcher: launch.Launcher, ranks: int, steps: int) -> float:
    """Run the example once. Returns its rate between step WARM_UP and the last step."""
    with tempfile.TemporaryDirectory() as folder:
        (process,) = launcher([str(EXAMPLE), "--steps", str(steps)], ranks, 1, 0)
        job = process.start(Path(folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        with job:
            times = step_times(job.stdout or [])
    if job.returncode != 0 or WARM_UP not in times:
        raise SystemExit(f"{process.command[2]} ended with {job.returncode} after steps {sorted(times)}")
    return rate(times)


def main() -> int:
    parser = measure.parser(__doc__, rounds=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    report = measure.Report("overhead", arguments)
    cases = {
        "flk": lambda: steps_per_second(launch.flk, arguments.ranks, arguments.steps),
        "torchrun": lambda: steps_per_second(launch.torchrun, arguments.ranks, arguments.steps),
    }
    what = f"rate of the example, {arguments.ranks} ranks"
    report.measure(what, cases, arguments.rounds, GOAL, "steps/s", digits=1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
