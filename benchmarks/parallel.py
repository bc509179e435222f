"""Measure the steps per second of each strategy under flk, and of the same strategy written by hand with torch.

    python benchmarks/parallel.py [--rounds 120] [--ranks 4] [--steps 1]

Both sides train the same model in the same processes, in alternating order: a round is --steps steps of each. Short
rounds make both sides see the same load of the machine. flk neither logs nor saves in these rounds.

A second comparison has flk's defaults under ddp: a line of metrics every 10 steps, a checkpoint every 100. The loop
by hand does the same work: it averages the loss over the ranks and prints it every 10 steps, and rank 0 saves model and
optimizer with torch.save every 100. Here a round is 100 steps.

Hybrid strategies shard over 2 ranks. On a machine with NVIDIA GPUs each rank has one. Goal: at least 0.98 of the rate
of the loop by hand.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flk_runtime
import launch
import measure
from flk_runtime.run.run import Run

GOAL = measure.at_least(0.98)
WARM_UP = 3  # steps that are not counted
BLOCKS, WIDTH, ROWS = 4, 192, 128
SHARD = min(2, int(os.environ.get("WORLD_SIZE", 2)))  # ranks per shard group of the hybrid strategies
SHARDING = ("shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")
LOG_EVERY, SAVE_EVERY = 10, 100  # flk's defaults, in steps


@dataclass(frozen=True)
class Case:
    """One comparison: a strategy, and whether both sides log and save."""

    strategy: str
    logs_and_saves: bool = False

    @property
    def name(self) -> str:
        return f"{self.strategy} with logs and checkpoints" if self.logs_and_saves else self.strategy


CASES = [
    Case("ddp"),
    Case("ddp", logs_and_saves=True),
    *(Case(strategy) for strategy in SHARDING),
]


class Block(nn.Module):
    """A residual block of two linear layers: (rows, WIDTH) to (rows, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.network(x)
        return x + y


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(BLOCKS))))


def begin(case: Case, folder: Path) -> Run:
    """flk's run of a case. Collective."""
    if case.logs_and_saves:
        return flk_runtime.init(strategy=case.strategy, checkpoint=folder / "flk")
    return flk_runtime.init(strategy=case.strategy, log_every=0)


def step_with_flk(run: Run, case: Case, device: torch.device) -> Callable[[], None]:
    """A training step of the model as flk wraps it."""
    shard_size = SHARD if case.strategy.startswith("hybrid") else None
    model = make_model()
    wrapped, optimizer = run.parallelize(
        model, torch.optim.AdamW(model.parameters()), blocks=[Block], shard_size=shard_size
    )
    return training_step(wrapped, optimizer, device, lambda loss: run.step(loss=loss))


def step_by_hand(case: Case, device: torch.device, folder: Path) -> Callable[[], None]:
    """A training step of the model as torch's documentation wraps it."""
    hybrid = case.strategy.startswith("hybrid")
    shape = (dist.get_world_size() // SHARD, SHARD) if hybrid else (dist.get_world_size(),)
    names = ("replicate", "shard") if hybrid else ("shard",)
    plain = make_model().to(device)
    model: nn.Module = plain
    if case.strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        reshard = case.strategy in ("full_shard", "hybrid_shard")
        for block in plain[1].children():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    after_step = log_and_save(model, optimizer, folder / "by-hand.pt") if case.logs_and_saves else lambda loss: None
    return training_step(model, optimizer, device, after_step)


def log_and_save(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> Callable[[torch.Tensor], None]:
    """Log the mean loss and save on rank 0, as often as flk does; a loop by hand calls this after each step."""
    steps = 0
    temporary = file.with_suffix(".temporary")

    def after_step(loss: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps % LOG_EVERY == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(json.dumps({"step": steps, "loss": mean.item() / dist.get_world_size()}), flush=True)
        if steps % SAVE_EVERY == 0:
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
                os.replace(temporary, file)
            dist.barrier()

    return after_step


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    after_step: Callable[[torch.Tensor], None],
) -> Callable[[], None]:
    """Forward, backward and the optimizer's step on a batch of shape (ROWS, WIDTH), then ``after_step`` of the loss."""
    x = torch.randn(ROWS, WIDTH, device=device)

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(loss)

    return step


def steps_per_second(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """The rate of all ranks together. Collective."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return steps / (time.perf_counter() - began)


def measure_ranks(rounds: int, steps: int) -> None:
    """Measure all cases; every rank runs this, and rank 0 writes the rates of both sides by round."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    main_rank = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as name:
        folders = [name]
        dist.broadcast_object_list(folders)  # all ranks use rank 0's
        for case in CASES:
            run = begin(case, Path(folders[0]))
            sides = {
                "flk": step_with_flk(run, case, device),
                "by hand": step_by_hand(case, device, Path(folders[0])),
            }
            for step in sides.values():
                steps_per_second(step, WARM_UP, device)
            count = SAVE_EVERY if case.logs_and_saves else steps
            rates = measure.alternate(
                {side: partial(steps_per_second, step, count, device) for side, step in sides.items()},
                max(min(rounds, 8), rounds // 10) if case.logs_and_saves else rounds,
                show=None,
            )
            run.abandon()  # the process group, which was opened by hand, stays
            if main_rank:
                measure.progress(f"{case.name} is measured")
                launch.write_result({"case": case.name, "flk": rates["flk"], "by hand": rates["by hand"]})
        dist.barrier()


def main() -> int:
    parser = measure.parser(__doc__, rounds=120)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="steps per round")
    arguments = parser.parse_args()
    if launch.RESULT in os.environ:
        measure_ranks(arguments.rounds, arguments.steps)
        return 0
    report = measure.Report("parallel", arguments)
    for found in launch.run_ranks(sys.argv, arguments.ranks):
        what = f"rate of {found['case']}, {arguments.ranks} ranks, flk / torch by hand"
        report.compare(what, found["flk"], found["by hand"], GOAL, "steps/s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
