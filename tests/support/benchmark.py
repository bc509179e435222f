"""A script that `flk bench` measures: 12 steps; with the argument broken, full_shard fails on rank 1."""

SCRIPT = """
import sys, torch, flk_runtime as flk
from torch import nn

with flk.init() as run:
    if "broken" in sys.argv and run.strategy == "full_shard" and run.rank == 1:
        raise MemoryError("rank 1 has no room")
    block = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    model = nn.Sequential(*(block() for _ in range(4)))
    model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
    for x in run.loader(torch.randn(64, 16), batch_size=2).steps(12):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
"""
