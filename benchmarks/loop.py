"""Measure `Run.step` and `Run.loader` against training loops written by hand.

    python benchmarks/loop.py [--rounds 30] [--ranks 2]

Each comparison runs both sides in the same processes, in alternating order:

- `Run.step`: the same small DistributedDataParallel model and the same batches. flk's loop calls `run.step(loss=loss)`,
  which logs every 10 steps; the loop by hand averages the loss over the ranks and prints it every 10 steps.
- `Run.loader`: an epoch of batches of small tensors in memory, and nothing else, so that the loader's own work shows.
  The loop by hand uses DataLoader and DistributedSampler.
- both together: an epoch of training with `Run.parallelize`, `Run.loader` and `Run.step`, against
  DistributedDataParallel, DataLoader and DistributedSampler.

Goal: at least 0.98 of the rate of the loop by hand, in steps per second; at least 0.9 for the loader alone, in batches
per second, where a batch takes some 100 microseconds and a real one takes longer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flk_runtime
import launch
import measure
from flk_runtime.training.run import Run

GOAL, LOADER_GOAL = measure.at_least(0.98), measure.at_least(0.9)
WIDTH, BATCH, STEPS = 64, 32, 100  # of a round: STEPS batches of shape (BATCH, WIDTH) on each rank
LOG_EVERY = 10  # flk's default, in steps
STEP, LOADER, BOTH = "rate of Run.step", "rate of Run.loader", "rate of training with Run.loader and Run.step"


class Sides:
    """The loops to compare. Each function runs one round and returns nothing. Collective."""

    def __init__(self, run: Run) -> None:
        samples = BATCH * STEPS * run.world_size
        dataset = TensorDataset(torch.randn(samples, WIDTH), torch.randn(samples, 1))
        self.run = run
        model = make_model()
        self.flk_model, self.flk_optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
        self.model = DistributedDataParallel(make_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.flk_loader = run.loader(dataset, batch_size=BATCH)
        self.sampler: DistributedSampler[object] = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=BATCH, sampler=self.sampler)
        self.batches = [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)) for _ in range(STEPS)]
        self.steps, self.epoch = 0, 0

    def step_with_flk(self) -> None:
        train(self.model, self.optimizer, self.batches, lambda loss: self.run.step(loss=loss))

    def step_by_hand(self) -> None:
        train(self.model, self.optimizer, self.batches, self.log)

    def load_with_flk(self) -> None:
        for _ in self.flk_loader:
            pass

    def load_by_hand(self) -> None:
        for _ in self.next_epoch():
            pass

    def train_with_flk(self) -> None:
        train(self.flk_model, self.flk_optimizer, self.flk_loader, lambda loss: self.run.step(loss=loss))

    def train_by_hand(self) -> None:
        train(self.model, self.optimizer, self.next_epoch(), self.log)

    def next_epoch(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        self.epoch += 1
        self.sampler.set_epoch(self.epoch)
        return self.loader

    def log(self, loss: torch.Tensor) -> None:
        """Count a step, and print the mean loss every LOG_EVERY steps, as a loop by hand does after each step."""
        self.steps += 1
        if self.steps % LOG_EVERY == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if self.run.is_main:
                print(json.dumps({"step": self.steps, "loss": mean.item() / self.run.world_size}), flush=True)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 1))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    after_step: Callable[[torch.Tensor], None],
) -> None:
    """A training step on each batch (inputs (BATCH, WIDTH), targets (BATCH, 1)), and ``after_step`` of its loss."""
    for inputs, targets in batches:
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(loss)


def rate(round_: Callable[[], None]) -> float:
    """Steps or batches per second of one round. Collective."""
    dist.barrier()
    began = time.perf_counter()
    round_()
    dist.barrier()
    return STEPS / (time.perf_counter() - began)


def measure_ranks(rounds: int) -> None:
    """Measure all comparisons; every rank runs this, and rank 0 writes the rates of both sides by round."""
    run = flk_runtime.init(strategy="ddp", device="cpu")
    sides = Sides(run)
    comparisons = {
        STEP: (sides.step_with_flk, sides.step_by_hand),
        LOADER: (sides.load_with_flk, sides.load_by_hand),
        BOTH: (sides.train_with_flk, sides.train_by_hand),
    }
    for name, (with_flk, by_hand) in comparisons.items():
        rates = measure.alternate(
            {"flk": partial(rate, with_flk), "by hand": partial(rate, by_hand)}, rounds, warmup=1, show=None
        )
        if run.is_main:
            measure.progress(f"{name} is measured")
            launch.write_result({"what": name, "flk": rates["flk"], "by hand": rates["by hand"]})
    run.close()


def main() -> int:
    parser = measure.parser(__doc__, rounds=30)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if launch.RESULT in os.environ:
        measure_ranks(arguments.rounds)
        return 0
    report = measure.Report("loop", arguments)
    for found in launch.run_ranks(sys.argv, arguments.ranks):
        what = f"{found['what']}, {arguments.ranks} ranks, flk / torch by hand"
        goal, unit = (LOADER_GOAL, "batches/s") if found["what"] == LOADER else (GOAL, "steps/s")
        report.compare(what, found["flk"], found["by hand"], goal, unit)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
