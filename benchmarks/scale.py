"""What one rank of 100,000 takes to shard a model and make a step: flk's parallelize, and bare torch doing the same.

    python benchmarks/scale.py [--ranks 100000] [--repeat 5]

Both run on torch's fake backend, which has as many ranks as it is told and moves nothing, as rank 0 of a hybrid mesh
with shard groups of 8 ranks. Time is what the processor works (nothing waits here) from the process group to the end
of the first step; memory is the peak of the process, torch itself included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings

LOCAL = 8  # ranks per node, and per shard group
BLOCKS, WIDTH = 4, 256


def flk(model, optimizer, ranks):
    """The model sharded by flk, its optimizer, and what follows a step."""
    import flk_runtime

    run = flk_runtime.init(strategy="hybrid_shard", log_every=0)
    model, optimizer = run.parallelize(model, optimizer, api="fsdp2")
    return model, optimizer, run.step


def torch_alone(model, optimizer, ranks):
    """The same with torch's own calls."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks // LOCAL, LOCAL), mesh_dim_names=("replicate", "shard"))
    for block in model[1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters()), lambda: None


def measure(how: str, ranks: int) -> None:
    """One process: print the seconds and the peak of memory, in MB."""
    # What either imports on its way is not part of the time, and all of it is part of both memories.
    import torch
    import torch._dynamo
    import torch.distributed as dist
    import torch.distributed.fsdp
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")  # the fake backend's
    began = time.process_time()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    block = lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))  # noqa: E731
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(block() for _ in range(BLOCKS))))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, done = {"flk": flk, "torch": torch_alone}[how](model, optimizer, ranks)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    done()
    assert next(model.parameters()).to_local().numel() == WIDTH * WIDTH // LOCAL
    seconds = time.process_time() - began
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--measure", choices=["flk", "torch"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.ranks)
    variables = {
        "RANK": "0",
        "WORLD_SIZE": str(arguments.ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(LOCAL),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nothing listens there, and nobody calls
        "OMP_NUM_THREADS": "1",
    }
    figures: dict[str, list[list[float]]] = {"flk": [], "torch": []}
    for _ in range(arguments.repeat):
        for how, found in figures.items():
            command = [sys.executable, __file__, "--measure", how, "--ranks", str(arguments.ranks)]
            ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=600)
            if ended.returncode:
                raise SystemExit(ended.stderr)
            found.append(json.loads(ended.stdout.splitlines()[-1]))
            print(f"{how:5} {found[-1][0]:6.2f} s {found[-1][1]:6.0f} MB", flush=True)
    medians = {
        how: [statistics.median(values) for values in zip(*found, strict=True)] for how, found in figures.items()
    }
    for number, (what, unit) in enumerate((("time", "s"), ("memory", "MB"))):
        ours, theirs = medians["flk"][number], medians["torch"][number]
        print(f"median: flk {ours:.2f} {unit}, torch {theirs:.2f} {unit}, {arguments.ranks} ranks")
        print(f"ratio scale-{what} {ours / theirs:.3f} goal 1.1 (lower is better)")


if __name__ == "__main__":
    main()
