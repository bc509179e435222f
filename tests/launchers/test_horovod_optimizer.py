"""DistributedOptimizer on Horovod's collectives, under horovodrun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SCRIPT = """
import copy
import sys

import torch
from torch import nn

import flk_runtime as flk

run = flk.init(device="cpu", strategy="none")
r, W = run.rank, run.world_size
assert W == 2, W
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
model.never = nn.Parameter(torch.ones(2))
alone = copy.deepcopy(model)
batches = torch.randn(5, 8, 4)


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


reference = make(alone)
for batch in batches:
    reference.zero_grad()
    alone(batch).square().mean().backward()
    nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    reference.step()

optimizer = flk.DistributedOptimizer(
    make(model), model.named_parameters(), collectives="horovod", backward_passes_per_step=2, bucket_bytes=64
)
for batch in batches:
    optimizer.zero_grad()
    for part in batch[4 * r : 4 * r + 4].split(2):
        (model(part).square().mean() / 2).backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
for one, other in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)

# A parameter that has a gradient on one rank only: the other takes part with zeros.
two = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
optimizer = flk.DistributedOptimizer(torch.optim.SGD(two.parameters(), lr=1.0), collectives="horovod")
two[r].sum().backward()
optimizer.step()
assert [one.tolist() for one in two] == [[0.5, 0.5]] * 2, two
sys.stdout.write(f"<rank {r} is through>\\n")
sys.stdout.flush()
run.close()
"""


def test_gradients_are_averaged_by_horovod(launch: Any, horovod: Any, tmp_path: Path) -> None:
    script = tmp_path / "optimizer.py"
    script.write_text(SCRIPT)
    ended = launch([*horovod.run, "-np", "2", "-H", "localhost:2", launch.python, str(script)], env=horovod.env)
    assert ended.codes == [0], ended.output
    assert sorted(re.findall(r"<rank \d is through>", ended.output)) == ["<rank 0 is through>", "<rank 1 is through>"]
