"""Steps per second of each strategy under flk, and of the same strategy written by hand with torch.

    python benchmarks/parallel.py [--ranks 4] [--rounds 120] [--steps 1]

Both train the same model in the same processes, by turns: a round is so many steps of the one, then of the other. The
shorter the turns, the more alike is what else the machine does meanwhile.
Hybrid strategies shard over 2 ranks. On a machine with NVIDIA GPUs each rank has one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import flk_runtime

GOAL = 0.98
WARM = 3  # steps that are not counted
BLOCKS, WIDTH, ROWS = 4, 192, 128
SHARD = min(2, int(os.environ.get("WORLD_SIZE", 2)))  # ranks per shard group of the hybrid strategies
CASES = [
    ("ddp", None),
    *((strategy, "fsdp2") for strategy in ("shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")),
    *((strategy, "fsdp1") for strategy in ("shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.network(x)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(BLOCKS))))


def by_flk(strategy: str, api: str | None, device: torch.device) -> Callable[[], None]:
    """A step of the model as flk wraps it."""
    run = flk_runtime.init(strategy=strategy, log_every=0)
    shard_size = SHARD if strategy.startswith("hybrid") else None
    model = make()
    model, optimizer = run.parallelize(
        model, torch.optim.AdamW(model.parameters()), api=api, blocks=[Block], shard_size=shard_size
    )
    return stepper(model, optimizer, device, run.step)


def by_hand(strategy: str, api: str | None, device: torch.device) -> Callable[[], None]:
    """A step of the model as torch's documents wrap it."""
    hybrid = strategy.startswith("hybrid")
    shape = (dist.get_world_size() // SHARD, SHARD) if hybrid else (dist.get_world_size(),)
    names = ("replicate", "shard") if hybrid else ("shard",)
    model = make().to(device)
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif api == "fsdp2":
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        reshard = strategy in ("full_shard", "hybrid_shard")
        for block in model[1]:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    else:
        chosen = {"hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2}.get(strategy)
        model = FullyShardedDataParallel(
            model,
            device_mesh=init_device_mesh(device.type, shape, mesh_dim_names=names),
            sharding_strategy=chosen or ShardingStrategy[strategy.upper()],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=device,
            use_orig_params=True,
        )
    return stepper(model, torch.optim.AdamW(model.parameters()), device, lambda: None)


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, done: Callable[[], None]
) -> Callable[[], None]:
    x = torch.randn(ROWS, WIDTH, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done()

    return step


def rate(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Steps per second of all ranks together."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return steps / (time.perf_counter() - began)


def compare(rounds: int, steps: int) -> None:
    """What every rank runs; rank 0 prints."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    for strategy, api in CASES:
        ours, theirs = by_flk(strategy, api, device), by_hand(strategy, api, device)
        rate(ours, WARM, device), rate(theirs, WARM, device)
        rates = []
        for number in range(rounds):
            pair = [ours, theirs] if number % 2 else [theirs, ours]
            measured = {id(step): rate(step, steps, device) for step in pair}
            rates.append((measured[id(ours)], measured[id(theirs)]))
        flk_runtime.init(strategy=strategy, log_every=0).abandon()
        if dist.get_rank() == 0:
            # Neighbours in time are compared, so that what else the machine does weighs on both alike.
            ratio = statistics.median(mine / other for mine, other in rates)
            name = strategy if api is None else f"{strategy}-{api}"
            mine, other = (statistics.median(values) for values in zip(*rates, strict=True))
            sys.stdout.write(f"median: flk {mine:.1f}, torch {other:.1f} steps/s\n")
            sys.stdout.write(f"ratio {name} {ratio:.3f} goal {GOAL} (higher is better)\n")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--steps", type=int, default=1)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        compare(arguments.rounds, arguments.steps)
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLK_PROCESSES": str(arguments.ranks)}
    command = [sys.executable, "-m", "flk_runtime", "--", *sys.argv]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        for line in job.stdout or ():
            if line.startswith("[rank 0] "):
                print(line.removeprefix("[rank 0] "), end="", flush=True)
        errors = job.stderr.read() if job.stderr else ""
    if job.returncode:
        raise SystemExit(errors)


if __name__ == "__main__":
    main()
