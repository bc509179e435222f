"""Measure time and memory in which one rank of 100,000 shards a model and makes a step, with flk and with torch alone.

    python benchmarks/scale.py [--rounds 10] [--ranks 100000]

Each side runs in its own process, and torch's process does not import flk_runtime. Both use torch's fake backend,
which has as many ranks as it is told and moves no data, as rank 0 of a hybrid mesh with shard groups of 8 ranks. The
time is CPU time (nothing waits here) from the process group to the end of the first step, without imports; the memory
is the peak of the process with all that it has imported. Goal: at most 1.1 times torch's.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import measure

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

GOAL = measure.at_most(1.1)
Sharded = tuple["nn.Module", "Optimizer", Callable[[], None]]  # and the function that a script calls after a step
LOCAL = 8  # ranks per node, and per shard group
BLOCKS, WIDTH = 4, 256


def import_flk() -> None:
    """Import the modules that a script under flk has imported when its model is sharded."""
    import flk_runtime.parallel.fsdp2
    import flk_runtime.training.entry.init  # noqa: F401


def shard_with_flk(
    model: nn.Module, optimizer: Optimizer, ranks: int
) -> tuple[nn.Module, Optimizer, Callable[[], None]]:
    """Shard the model with flk. Returns it with its optimizer, and the function that a script calls after a step."""
    import flk_runtime

    run = flk_runtime.init(strategy="hybrid_shard", log_every=0)
    model, optimizer = run.parallelize(model, optimizer)
    return model, optimizer, run.step


def import_torch() -> None:
    """Import the modules that a script with torch alone has imported when its model is sharded."""
    import torch.distributed.device_mesh
    import torch.distributed.fsdp  # noqa: F401


def shard_with_torch(model: nn.Module, optimizer: Optimizer, ranks: int) -> Sharded:
    """Shard the model with torch's own calls."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks // LOCAL, LOCAL), mesh_dim_names=("replicate", "shard"))
    for block in model[1]:  # type: ignore[index]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters()), lambda: None


SIDES = {"flk": (import_flk, shard_with_flk), "torch": (import_torch, shard_with_torch)}


def measure_here(side: str, ranks: int) -> None:
    """Measure one side in this process: print the seconds of CPU time, and the peak of memory in MB, as JSON."""
    imports, shard = SIDES[side]
    import torch
    import torch._dynamo  # the first optimizer of a process imports it
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    imports()
    warnings.simplefilter("ignore")  # the fake backend's
    began = time.process_time()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(block() for _ in range(BLOCKS))))
    optimizer: Optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, after_step = shard(model, optimizer, ranks)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    after_step()
    assert next(model.parameters()).to_local().numel() == WIDTH * WIDTH // LOCAL  # type: ignore[attr-defined]
    seconds = time.process_time() - began
    assert side == "flk" or "flk_runtime" not in sys.modules
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), flush=True)
    os._exit(0)


def measure_apart(side: str, ranks: int) -> tuple[float, float]:
    """Measure one side in a new process. Returns seconds and MB."""
    variables = {
        "RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(LOCAL),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nothing listens there, and nothing connects
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--side", side, "--ranks", str(ranks)]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    seconds, megabytes = json.loads(ended.stdout.splitlines()[-1])
    return seconds, megabytes


def main() -> int:
    parser = measure.parser(__doc__, rounds=10)
    parser.add_argument("--ranks", type=int, default=100_000)
    parser.add_argument("--side", choices=SIDES, help="measure one side in this process, once")
    arguments = parser.parse_args()
    if arguments.side:
        measure_here(arguments.side, arguments.ranks)
    report = measure.Report("scale", arguments)
    found = measure.alternate(
        {
            "flk": lambda: measure_apart("flk", arguments.ranks),
            "torch": lambda: measure_apart("torch", arguments.ranks),
        },
        arguments.rounds,
        show=lambda value: "{:.2f} s {:.0f} MB".format(*value),
    )
    for number, (quantity, unit) in enumerate((("CPU time", "s"), ("peak memory", "MB"))):
        ours, theirs = ([value[number] for value in found[side]] for side in ("flk", "torch"))
        what = f"{quantity} to shard and step as one of {arguments.ranks:,} ranks, flk / torch"
        report.compare(what, ours, theirs, GOAL, unit)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
