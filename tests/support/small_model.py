"""A small language model and its training, as the beginning of scripts that `Ranks` runs."""

from __future__ import annotations

import json
from typing import Any

SHARDING = ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")

# The training takes the same global batches at every world size. No dimension of a parameter is a multiple of the
# number of ranks, so that shards are uneven.
SMALL_MODEL = """
import contextlib, functools, gc, json, os, shutil, warnings, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import flk_runtime as flk

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width + 1), nn.Linear(4 * width + 1, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, tied=False, words=11, width=6, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if tied:
            self.embedding.weight = self.head.weight

    def forward(self, x):
        x = self.embedding(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def build(tied=False, freeze=(), meta=False, seed=3):
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model = Net(tied)
    if meta:
        model.scale = torch.ones(1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(freeze)))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    return model, torch.optim.AdamW(groups, lr=0.01, fused=True)  # shards take a quarter of the time less

def data(steps, accumulation):
    # (steps, accumulation, 4 parts, 2 sequences, 9 words)
    return torch.randint(0, 11, (steps, accumulation, 4, 2, 9), generator=torch.Generator().manual_seed(5))

def loss_of(model, words):
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

def share(run, parts):
    n = 4 // run.world_size
    return parts[run.rank * n : (run.rank + 1) * n].flatten(0, 1)

def train(run, model, optimizer, steps=5, accumulation=1, clip=None, first=0):
    # The mean loss of each step, after the gradients' norm where they are clipped.
    seen = []
    for parts in data(6, accumulation)[first:steps]:
        optimizer.zero_grad()
        total = 0.0
        for number, part in enumerate(parts):
            with run.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                loss = loss_of(model, share(run, part)) / accumulation
                loss.backward()
            total += loss.item()
        if clip:
            norm = run.clip_grad_norm(clip, model=model)
            assert type(norm) is torch.Tensor and norm.shape == ()
            # Adam makes the same step of gradients that are scaled, so that the losses do not show it.
            after = run.clip_grad_norm(float("inf"), model=model)
            torch.testing.assert_close(after, norm.clamp(max=clip), rtol=1e-4, atol=0)
            seen.append(norm.item())
        optimizer.step()
        run.step()
        seen.append(run.mean(total))
    return seen

@contextlib.contextmanager
def group():
    # One process group for several runs; a world of one has no launcher's variables, and a group per run.
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

def init(strategy, **options):
    return flk.init(**{"strategy": strategy, "device": "cpu", "log_every": 0, **options})

def hybrid(name):
    return {"shard_size": 2} if name.startswith("hybrid") else {}

def refused(words, action):
    try:
        action()
    except (flk.SetupError, flk.CheckpointError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")

def tell(key, value):
    print("=", json.dumps([key, value]), flush=True)
"""

# With a block that is neither the first nor the last, for tests of the strategies themselves. Others do not need it:
# each block takes processor time in each step of each rank.
THREE_BLOCKS = SMALL_MODEL.replace("blocks=2", "blocks=3")


# An optimizer whose state holds more than tensors, as in many libraries. Its script imports torch.
COUNTING = """
class Counting(torch.optim.Optimizer):
    with_text = True  # torch's FSDP1 changes texts

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state.update(step=0, scale=0.5, on=True, nothing=None, average=torch.zeros_like(each))
                    if self.with_text:
                        state["text"] = "a text"
                assert state["on"] is True and state["nothing"] is None
                assert state.get("text", "a text") == "a text"
                state["step"] += 1
                state["scale"] *= 0.9
                state["average"].mul_(0.9).add_(each.grad)
                each.add_(state["average"], alpha=-group["lr"] / state["step"] * state["scale"])
"""


def told(ended: Any) -> dict[str, Any]:
    """The values that a rank printed with the script's ``tell``."""
    return dict(json.loads(line[2:]) for line in ended.lines if line.startswith("= "))
