"""Measure the steps per second of each strategy under flk, and of the same strategy written by hand with torch.

    python benchmarks/parallel.py [--rounds 120] [--ranks 4] [--steps 1] [--host]

Both sides train the same model in the same processes, in alternating order: a round is --steps steps of each. Short
rounds make both sides see the same load of the machine. flk neither logs nor saves in these rounds.

A second comparison has flk's defaults under ddp: a line of metrics every 10 steps, a checkpoint every 100. The loop
by hand does the same work: it averages the loss over the ranks and prints it every 10 steps, and rank 0 saves model and
optimizer with torch.save every 100. Here a round is 100 steps.

A third comparison is of the host's time: 12 blocks that compute next to nothing, on one rank and on the CPU, so that a
step is what Python and torch's dispatcher do. It counts the time of the processor, which other processes do not change
much. A GPU waits for the host in each step that is bound by it, as of small models.

Hybrid strategies shard over 2 ranks. On a machine with NVIDIA GPUs each rank has one. Goal: at least 0.98 of the rate
of the loop by hand.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
from flk_runtime.training.run import Run

GOAL = measure.at_least(0.98)
WARM_UP, OF_CHECKS = 3, 20  # steps that are not counted; of the host's time, in the first of which flk compares tensors
SHARD = min(2, int(os.environ.get("WORLD_SIZE", 2)))  # ranks per shard group of the hybrid strategies
SHARDING = ("shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")
LOG_EVERY, SAVE_EVERY = 10, 100  # flk's defaults, in steps
COMPILER = "aot_eager"  # of the host's time: it needs no compiler of the machine


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and the rows of its batch."""

    blocks: int
    width: int
    rows: int


SHAPE, TINY = Shape(4, 192, 128), Shape(12, 16, 2)


@dataclass(frozen=True)
class Case:
    """One comparison: a strategy, whether both sides log and save, and whether it is of the host's time."""

    strategy: str
    logs_and_saves: bool = False
    host: bool = False
    compiled: bool = False

    @property
    def shape(self) -> Shape:
        return TINY if self.host else SHAPE

    @property
    def name(self) -> str:
        if self.host:
            return f"{self.strategy}{', compiled,' if self.compiled else ''} by the host's time"
        return f"{self.strategy} with logs and checkpoints" if self.logs_and_saves else self.strategy


CASES = [
    Case("ddp"),
    Case("ddp", logs_and_saves=True),
    *(Case(strategy) for strategy in SHARDING),
]
OF_HOST = [Case("full_shard", host=True), Case("full_shard", host=True, compiled=True)]


class Block(nn.Module):
    """A residual block of two linear layers: (rows, width) to (rows, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.network(x)
        return x + y


class Model(nn.Sequential):
    """A linear layer and blocks."""

    def __init__(self, shape: Shape) -> None:
        blocks = nn.Sequential(*(Block(shape.width) for _ in range(shape.blocks)))
        super().__init__(nn.Linear(shape.width, shape.width), blocks)


class ByHand(Model):
    """The same model as a class of its own, since flk adds a check to the calls of a class that it has sharded."""


def begin(case: Case, device: torch.device, folder: Path) -> Run:
    """flk's run of a case. Collective."""
    if case.logs_and_saves:
        return flk_runtime.init(strategy=case.strategy, device=device, checkpoint=folder / "flk")
    return flk_runtime.init(strategy=case.strategy, device=device, log_every=0)


def step_with_flk(run: Run, case: Case, device: torch.device) -> Callable[[], None]:
    """A training step of the model as flk wraps it."""
    shard_size = SHARD if case.strategy.startswith("hybrid") else None
    model = Model(case.shape)
    wrapped, optimizer = run.parallelize(
        model,
        torch.optim.AdamW(model.parameters()),
        blocks=[Block],
        shard_size=shard_size,
        compile=COMPILER if case.compiled else False,
    )
    return training_step(wrapped, optimizer, case, device, lambda loss: run.step(loss=loss))


def step_by_hand(case: Case, device: torch.device, folder: Path) -> Callable[[], None]:
    """A training step of the model as torch's documentation wraps it."""
    hybrid = case.strategy.startswith("hybrid")
    shape = (dist.get_world_size() // SHARD, SHARD) if hybrid else (dist.get_world_size(),)
    names = ("replicate", "shard") if hybrid else ("shard",)
    plain = ByHand(case.shape).to(device)
    for block in plain[1].children() if case.compiled else ():
        block.compile(backend=COMPILER)
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
    return training_step(model, optimizer, case, device, after_step)


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
    case: Case,
    device: torch.device,
    after_step: Callable[[torch.Tensor], None],
) -> Callable[[], None]:
    """Forward, backward and the optimizer's step on a batch of shape (rows, width), then ``after_step`` of the loss."""
    x = torch.randn(case.shape.rows, case.shape.width, device=device)

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


def steps_per_processor_second(step: Callable[[], None], steps: int) -> float:
    """The rate of this rank by the time of the processor, on the CPU."""
    began = time.process_time()
    for _ in range(steps):
        step()
    return steps / (time.process_time() - began)


def measure_ranks(cases: Sequence[Case], rounds: int, steps: int) -> None:
    """Measure all ``cases``; every rank runs this, and rank 0 writes the rates of both sides by round."""
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and cases is not OF_HOST
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    main_rank = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as name:
        folders = [name]
        dist.broadcast_object_list(folders)  # all ranks use rank 0's
        for case in cases:
            run = begin(case, device, Path(folders[0]))
            sides = {
                "flk": step_with_flk(run, case, device),
                "by hand": step_by_hand(case, device, Path(folders[0])),
            }
            for step in sides.values():
                steps_per_second(step, OF_CHECKS if case.host else WARM_UP, device)
            rate = steps_per_processor_second if case.host else partial(steps_per_second, device=device)
            count = SAVE_EVERY if case.logs_and_saves else steps
            rates = measure.alternate(
                {side: partial(rate, step, count) for side, step in sides.items()},
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
    parser.add_argument("--host", action="store_true", help="measure the host's time alone")
    arguments = parser.parse_args()
    if launch.RESULT in os.environ:
        measure_ranks(OF_HOST if arguments.host else CASES, arguments.rounds, arguments.steps)
        return 0
    report = measure.Report("parallel", arguments)
    parts = [([*sys.argv, "--host"], 1)]
    if not arguments.host:
        parts.insert(0, (sys.argv, arguments.ranks))
    for script, ranks in parts:
        for found in launch.run_ranks(script, ranks):
            what = f"rate of {found['case']}, {ranks} rank{'s' if ranks > 1 else ''}, flk / torch by hand"
            report.compare(what, found["flk"], found["by hand"], GOAL, "steps/s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
