"""DistributedOptimizer, synchronize and main_process_first, between real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPTIMIZER = """
import contextlib, copy
import torch
import torch.distributed as dist
import flk_runtime as flk
from torch import nn
from torch.nn import functional as F

run = flk.init(device="cpu", strategy="none", seed=3)
r, W = run.rank, run.world_size
BATCH = 12
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
start = copy.deepcopy(model.state_dict())
X, Y = torch.randn(20, BATCH, 4), torch.randn(20, BATCH, 2)

def loss_of(model, step, part=slice(None)):
    return F.mse_loss(model(X[step][part]), Y[step][part])

mine = slice(r * BATCH // W, (r + 1) * BATCH // W)

def same(one, other):
    for a, b in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)

def reference(steps, make, clip=None):
    alone = copy.deepcopy(model); alone.load_state_dict(start)
    optimizer = make(alone.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(alone, step).backward()
        if clip: nn.utils.clip_grad_norm_(alone.parameters(), clip)
        optimizer.step()
    return alone

make = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)

def fresh(make=make):
    model.load_state_dict(start)
    model.zero_grad()
    copied = copy.deepcopy(model)
    return copied, flk.DistributedOptimizer(make(copied.parameters()))

# As one process on the same batches
trained, optimizer = fresh()
for step in range(5):
    optimizer.zero_grad()
    loss_of(trained, step, mine).backward()
    total = torch.ones(()); dist.all_reduce(total)  # the script's own collectives don't mix with them
    optimizer.step()
same(trained, reference(5, make))

# What torch expects of an optimizer
assert isinstance(optimizer, torch.optim.Optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
optimizer.zero_grad(); loss_of(trained, 5, mine).backward(); optimizer.step(); scheduler.step()
assert optimizer.param_groups[0]["lr"] == 0.005 and "lr: 0.005" in repr(optimizer)
state = optimizer.state_dict()
assert state["param_groups"][0]["lr"] == 0.005 and len(state["state"]) == 6
optimizer.load_state_dict(state)
assert optimizer.defaults["lr"] == 0.01
calls = []
optimizer.register_step_post_hook(lambda *_: calls.append(1))
optimizer.zero_grad(); loss_of(trained, 5, mine).backward(); optimizer.step()
assert calls == [1]

# Accumulation: without messages, and with averages of averages
middle = (mine.start + mine.stop) // 2
half = [slice(mine.start, middle), slice(middle, mine.stop)]
for silent in (True, False):
    trained, optimizer = fresh()
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync() if silent else contextlib.nullcontext():
            (loss_of(trained, step, half[0]) / 2).backward()
        (loss_of(trained, step, half[1]) / 2).backward()
        optimizer.step()
    same(trained, reference(3, make))

# Clipping before the step
trained, optimizer = fresh()
for step in range(3):
    optimizer.zero_grad()
    loss_of(trained, step, mine).backward()
    nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
    optimizer.step()
same(trained, reference(3, make, clip=0.1))

# GradScaler: after an overflow on one rank, all ranks skip the step
trained, optimizer = fresh(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(2):
    optimizer.zero_grad()
    scaler.scale(loss_of(trained, step, mine) * (float("inf") if step == 1 and r == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
same(trained, reference(1, lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
assert scaler.get_scale() == 2.0

# Parameters that are frozen, unfrozen or added later
one, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
optimizer = flk.DistributedOptimizer(torch.optim.SGD([one, frozen], lr=1.0))
(one.sum() * (r + 1)).backward()
optimizer.step()
assert torch.allclose(one, torch.full((2,), 1 - (W + 1) / 2)) and frozen.tolist() == [1, 1]
frozen.requires_grad_(True)
one.requires_grad_(False)
late = nn.Parameter(torch.ones(2))
optimizer.add_param_group({"params": [late], "lr": 0.5})
optimizer.zero_grad()
((frozen + late).sum() * (r + 1)).backward()
optimizer.step()
assert torch.allclose(frozen, torch.full((2,), 1 - (W + 1) / 2)), frozen
assert torch.allclose(late, torch.full((2,), 1 - 0.5 * (W + 1) / 2)), late

# Gradients that the script sets
optimizer.zero_grad()
frozen.grad, late.grad = torch.full((2,), float(r)), torch.zeros(2)
optimizer.synchronize()
assert frozen.grad.tolist() == [(W - 1) / 2] * 2
optimizer.step()

# Other kinds of numbers
kinds = (torch.bfloat16, torch.float64, torch.complex64, torch.float16)
several = [nn.Parameter(torch.ones(3, dtype=kind)) for kind in kinds]
optimizer = flk.DistributedOptimizer(torch.optim.SGD(several, lr=1.0))
sum((p.abs() * (r + 1)).sum().double() for p in several).backward()
optimizer.step()
for p in several:
    expected = torch.full((3,), abs(1 - (W + 1) / 2), dtype=torch.float64)
    assert torch.allclose(p.detach().abs().double(), expected, atol=1e-2), p

# Another optimizer takes over
trained, optimizer = fresh()
optimizer = flk.DistributedOptimizer(make(trained.parameters()))
for step in range(2):
    optimizer.zero_grad(); loss_of(trained, step, mine).backward(); optimizer.step()
same(trained, reference(2, make))

# Mistakes
def complains(call):
    try:
        call()
    except flk.SetupError as error:
        print(error)
    else:
        print("nothing")
trained, optimizer = fresh()
with optimizer.no_sync():
    loss_of(trained, 0, mine).backward()
complains(optimizer.step)
loss_of(trained, 0, mine).backward()
optimizer.step()
complains(optimizer.step)
trained[0](X[0]).sum().backward()  # not all parameters
complains(lambda: trained[0](X[0]).sum().backward())
complains(optimizer.step)
embedding = nn.Embedding(4, 2, sparse=True)
sparse = flk.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
complains(lambda: embedding(torch.tensor([1])).sum().backward())
complains(lambda: optimizer.step(lambda: None))
complains(lambda: flk.DistributedOptimizer(optimizer))
complains(lambda: flk.DistributedOptimizer(make(nn.Linear(2, 2 + (r == 1)).parameters())))

# Through a run: its snapshot has the given optimizer's state
other = nn.Linear(2, 2)
wrapped, optimizer = run.parallelize(other, flk.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1)))
wrapped(torch.ones(2)).sum().backward()
optimizer.step()
run.step()
run.close()
"""

CURE = (
    " outside of no_sync: call synchronize() for gradients that the script has set, freeze parameters that are not "
    "trained, or use run.parallelize, with find_unused_parameters=True where ranks use different parameters"
)
NONE = "DistributedOptimizer has averaged no gradients for this step, since "
MISTAKES = [
    f"{NONE}there was no backward pass{CURE}",
    f"{NONE}there was no backward pass{CURE}",
    f"{NONE}a parameter of shape (8, 8) had no gradient{CURE}",
    f"{NONE}a parameter of shape (8, 8) had no gradient{CURE}",
    "all_reduce(mean): tree[0] is float32 (4, 2) on cpu, sparse or quantized: convert it before",
    "DistributedOptimizer.step takes no closure: compute the gradients before",
    "DistributedOptimizer takes an optimizer of torch, not a DistributedOptimizer",
    "DistributedOptimizer: the ranks differ, so nothing was exchanged: tree[0][0] is "
    "float32 (2, 2) on cpu on ranks 0, 2, and float32 (3, 2) on cpu on rank 1",
]


def test_it_trains_as_one_process(ranks: Callable[..., list[Any]]) -> None:
    for one in ranks(OPTIMIZER, 3):
        assert one.lines == MISTAKES


SYNCHRONIZE = """
import collections
import torch
import flk_runtime as flk
from torch import nn

run = flk.init(device="cpu", strategy="none")
r, W = run.rank, run.world_size
torch.manual_seed(r)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight  # tied
        self.register_buffer("scratch", torch.full((2,), float(r)), persistent=False)
        self.low = nn.Parameter(torch.full((2,), float(r), dtype=torch.bfloat16))
    def forward(self, x):
        return self.last(self.norm(self.first(x))) + self.low.float().sum()

def alike(tensor):
    most, least = (flk.all_reduce(tensor.detach().clone().double(), op) for op in ("max", "min"))
    assert most.equal(least), tensor

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (r + 1), betas=(0.1 * r, 0.9))
fused = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=torch.tensor(1.0 + r), momentum=0.9)
fused.param_groups[0]["decays"] = lambda name: r  # cannot be sent
if r == 1:  # only the root has made state
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    # state in another dtype than the parameter's stays so
    optimizer.state[model.low]["exp_avg"] = torch.tensor([1.001, 2.002], dtype=torch.float32)
    optimizer.param_groups[0]["extra"] = "from root"
weight = model.first.weight
exp_avg = optimizer.state.get(weight, {}).get("exp_avg")
Point = collections.namedtuple("Point", "x y")
tree = {"model": model, "list": [optimizer, fused], "n": r + 1.5, "p": Point(torch.full((2,), r), f"rank {r}"),
        "none": None}
got = flk.synchronize(tree, root=1)
assert got["model"] is model and got["list"][0] is optimizer and got["n"] == 2.5 and tree["n"] == r + 1.5
assert got["p"].y == f"rank {r}" and got["p"].x.tolist() == [1, 1] and got["none"] is None
assert model.first.weight is weight is model.last.weight and model.scratch.tolist() == [1, 1]
for tensor in (*model.parameters(), *model.buffers()):
    alike(tensor)
assert model.norm.num_batches_tracked.item() == 1
assert optimizer.param_groups[0]["lr"] == 0.2 and optimizer.param_groups[0]["betas"] == (0.1, 0.9)
assert optimizer.param_groups[0]["extra"] == "from root" and len(optimizer.param_groups[0]["params"]) == 6
assert fused.param_groups[0]["lr"].item() == 2.0 and fused.param_groups[0]["decays"]("bias") == r
assert len(optimizer.state) == 6
for state in optimizer.state.values():
    for tensor in state.values():
        alike(tensor)
low = optimizer.state[model.low]["exp_avg"]
assert low.dtype is torch.float32 and low.tolist() == torch.tensor([1.001, 2.002]).tolist()
if r == 1:
    assert optimizer.state[weight]["exp_avg"] is exp_avg
optimizer.state[model.low]["exp_avg"] = low.bfloat16()  # AdamW itself wants it so
# Trained alike from here on
for _ in range(2):
    optimizer.zero_grad(); model(torch.ones(4, 3)).sum().backward(); optimizer.step()
for tensor in (*model.parameters(), *model.buffers()):
    alike(tensor)
# State that only another rank has goes
flk.synchronize(fused, root=0)
if r == 2:
    fused.state[fused.param_groups[0]["params"][0]]["momentum_buffer"] = torch.ones(2)
flk.synchronize(fused, root=0)
assert not fused.state
averaged = flk.DistributedOptimizer(optimizer)
averaged.param_groups[0]["lr"] = r * 1.0
assert flk.synchronize(averaged) is averaged and optimizer.param_groups[0]["lr"] == 0.0

def complains(call):
    try:
        call()
    except flk.SetupError as error:
        print(error)
complains(lambda: flk.synchronize({"m": nn.Linear(2, 2 + (r == 2))}))
complains(lambda: flk.synchronize([model] if r else [optimizer]))
complains(lambda: flk.synchronize(model, root=3))
if hasattr(torch.distributed, "fsdp"):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (W,)))
    complains(lambda: flk.synchronize(sharded))
    complains(lambda: flk.all_reduce(list(sharded.parameters())))
    complains(lambda: flk.DistributedOptimizer(torch.optim.SGD(sharded.parameters(), lr=1.0)))
run.close()
"""


def test_synchronize(ranks: Callable[..., list[Any]]) -> None:
    parts = "a DTensor: each rank holds another shard of it, and its wrapper keeps the shards consistent"
    for one in ranks(SYNCHRONIZE, 3):
        lines = one.lines
        assert len(lines) == 6, one.output
        assert lines[0].endswith(
            "tree['m']['bias'] is float32 (2,) on cpu on ranks 0-1, and float32 (3,) on cpu on rank 2"
        )
        assert lines[1].endswith("tree[0] is a mapping on ranks 1-2, and a list on rank 0")
        assert lines[2] == "synchronize: root=3: expected a rank from 0 to 2"
        assert all(line.endswith(parts) for line in lines[3:])


FIRST = """
import os
import sys
from pathlib import Path
import flk_runtime as flk

run = flk.init(device="cpu", strategy="none")
r = run.rank
folder = Path(os.environ["FOLDER"])
for local, first in ((False, [0]), (True, [0, 2])):
    with flk.main_process_first(local=local):
        there = {path.name for path in folder.glob(f"{local}-*")}
        if r in first:
            (folder / f"{local}-{r}").write_text("made")
        else:
            assert there >= {f"{local}-{rank}" for rank in first}, there

try:
    with flk.main_process_first():
        if r == 0:
            raise OSError("no space left")
        print("never here")
except (OSError, flk.PeerError) as error:
    print(type(error).__name__, error)
try:
    with flk.main_process_first(local=True):
        if r == 2:
            raise OSError("no space left")
except (OSError, flk.PeerError) as error:
    print(type(error).__name__, error)
try:
    with flk.main_process_first():
        if r == 1:
            raise ValueError("only here")  # after the first: this rank's own affair
except ValueError as error:
    print(error)
run.close()
"""


def test_main_process_first(ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    nodes = {rank: {"LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)} for rank in range(4)}
    ended = ranks(FIRST, 4, {"FOLDER": str(tmp_path), "LOCAL_WORLD_SIZE": "2"}, nodes)
    text = "failed inside main_process_first(): OSError: no space left"
    for rank, one in enumerate(ended):
        assert one.lines == [
            "OSError no space left" if rank == 0 else f"PeerError rank 0 {text}",
            "OSError no space left" if rank == 2 else f"PeerError rank 2 {text}",
            *(["only here"] if rank == 1 else []),
        ]


ALONE = """
import torch
import flk_runtime as flk

def complains(call):
    try:
        call()
    except flk.SetupError as error:
        print(error)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
complains(lambda: flk.DistributedOptimizer(optimizer))
with flk.init(device="cpu") as run:
    wrapped = flk.DistributedOptimizer(optimizer)
    wrapped.zero_grad()
    (optimizer.param_groups[0]["params"][0] * 3).sum().backward()
    wrapped.step()
    print(optimizer.param_groups[0]["params"][0].item())
    with flk.main_process_first():
        print("alone")
"""


def test_alone_it_is_the_given_optimizer(ranks: Callable[..., list[Any]]) -> None:
    (one,) = ranks(ALONE, 1)
    assert one.lines[0] == "DistributedOptimizer needs the process group: call flk_runtime.init() before"
    assert one.lines[1:] == ["-2.0", "alone"]
