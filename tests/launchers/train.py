"""The one script that every launcher starts: ten steps on the same global batches, whatever the number of ranks.

It knows of no launcher. In float64 the order in which ranks add up their gradients is far below the 1e-6 that tests
allow, so its loss is the same for every world size. Rank 0 prints one line of JSON.

With the argument `parallelize` flk averages the gradients. Else the script does, without the imports of DDP and of
torch's optimizers, which take as much processor time as all the rest of a rank.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import flk_runtime as flk

STEPS, GLOBAL_BATCH, LEARNING_RATE = 10, 8, 0.5


def main() -> None:
    torch.set_default_dtype(torch.float64)
    own = "parallelize" not in sys.argv
    run = flk.init(device="cpu", seed=7, timeout=60, **({"strategy": "none"} if own else {}))
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(48, 16, generator=generator), torch.randint(4, (48,), generator=generator)
    trained = model if own else run.parallelize(model)
    loader = run.loader(TensorDataset(inputs, targets), batch_size=GLOBAL_BATCH // run.world_size)
    for x, y in loader.steps(STEPS):
        loss = nn.functional.cross_entropy(trained(x), y)
        trained.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if own and run.world_size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= run.world_size
            parameter.data -= LEARNING_RATE * parameter.grad
        run.step(loss)
    with torch.no_grad():
        final = nn.functional.cross_entropy(model(inputs), targets).item()
    mine = [run.rank, run.local_rank, run.rank_info.node_rank, run.local_world_size]
    ranks: list[list[int]] = [mine] * run.world_size
    if run.world_size > 1:
        dist.all_gather_object(ranks, mine)
    if run.is_main:
        found = {"launcher": run.rank_info.launcher, "loss": final, "world_size": run.world_size, "ranks": ranks}
        print("\n" + json.dumps(found), flush=True)
    run.close()


main()
