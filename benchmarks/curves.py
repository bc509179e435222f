"""Measure what the curves in TensorBoard cost a training whose steps take 20 ms.

    python benchmarks/curves.py [--rounds 40]

One process calls `Run.step`, which prints a line of metrics every 10 steps. In one half of the rounds its lines go to
TensorBoard files too, in the other half not. What is measured is the processor time of the whole process per step,
threads included, since the difference is far below the noise of a clock on a machine that does other things. The work
of a step is not done: 20 ms are added to both sides. A thread delays the training by its processor time at most.

Goal: at least 0.995 of the rate without.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import flk_runtime
import measure
from flk_sinks.curves import Curves

GOAL = measure.at_least(0.995)
STEP, STEPS = 0.02, 500  # seconds of a step, and steps of a round


class Training:
    """A training whose lines go to TensorBoard or not."""

    def __init__(self, run: flk_runtime.Run) -> None:
        self._run = run
        (recorder,) = run._context.lines.recorders
        assert isinstance(recorder, Curves)
        self._curves = recorder

    def rate(self, *, curves: bool) -> float:
        """Steps per second of a round."""
        self._run._context.lines.recorders[:] = [self._curves] if curves else []
        began = time.process_time()
        for _ in range(STEPS):
            self._run.step(loss=1.0, lr=1e-3, grad_norm=0.5)
            while any(each._rows for each in self._curves._writers.values()):
                time.sleep(0.001)  # each line is written by itself, as with steps that take their time
        return 1 / (STEP + (time.process_time() - began) / STEPS)


def main() -> int:
    arguments = measure.parser(__doc__, rounds=40).parse_args()
    report = measure.Report("curves", arguments)
    with tempfile.TemporaryDirectory() as folder:
        output = os.dup(1)  # lines of metrics are not part of the report
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with flk_runtime.init(device="cpu", metrics=f"tensorboard:{folder}") as run:
            training = Training(run)
            cases = {"with": lambda: training.rate(curves=True), "without": lambda: training.rate(curves=False)}
            rates = measure.alternate(cases, arguments.rounds, warmup=2, show="{:.2f} steps/s".format)
        os.dup2(output, 1)
    what = "rate of steps of 20 ms, with curves in TensorBoard / without"
    report.compare(what, rates["with"], rates["without"], GOAL, "steps/s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
