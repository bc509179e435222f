"""Measure what the curves in TensorBoard cost a training whose steps take 20 ms.

    python benchmarks/curves.py [--rounds 60]

One process trains with `Run.step`, which prints a line of metrics every 10 steps. In one half of the rounds its lines
go to TensorBoard files too, in the other half not. The work of a step is a product of matrices of some 20 ms in
one thread, which holds no lock of Python, as a step on a GPU.

Goal: at least 0.995 of the rate without.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch

import flk_runtime
import measure

GOAL = measure.at_least(0.995)
STEP, STEPS = 0.02, 50  # seconds of a step, and steps of a round


class Training:
    """A training whose lines go to TensorBoard or not."""

    def __init__(self, run: flk_runtime.Run) -> None:
        self._run = run
        self._recorders = list(run._context.recorders)
        self._matrix = torch.randn(700, 700)
        products, began = 20, time.perf_counter()
        for _ in range(products):
            self._work(1)
        self._products = max(1, round(STEP / ((time.perf_counter() - began) / products)))

    def rate(self, *, curves: bool) -> float:
        """Steps per second of a round."""
        self._run._context.recorders[:] = self._recorders if curves else []
        began = time.perf_counter()
        for _ in range(STEPS):
            self._work(self._products)
            self._run.step(loss=1.0, lr=1e-3, grad_norm=0.5)
        return STEPS / (time.perf_counter() - began)

    def _work(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._matrix, self._matrix)


def main() -> int:
    arguments = measure.parser(__doc__, rounds=60).parse_args()
    report = measure.Report("curves", arguments)
    torch.set_num_threads(1)
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
