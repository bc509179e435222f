"""A plain script written for torchrun: it reads RANK and wraps its model in DDP. It does not use flk.

    flk run --replicas 2 examples/nanogpt/train.py
    torchrun --nproc-per-node 2 examples/nanogpt/train.py
    python examples/nanogpt/train.py

A character-level GPT learns a text that repeats itself, from 8 pieces of text per step over all processes.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TEXT = "All work and no play makes Jack a dull boy. " * 40
STEPS, PIECES, LENGTH, WIDTH, HEADS, LAYERS = 30, 8, 32, 48, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        parts = self.attend(self.norm_1(x)).split(WIDTH, dim=2)
        query, key, value = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.network(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.letters, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, x):
        x = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.scores(self.norm(self.blocks(x)))


def main():
    ddp = "RANK" in os.environ
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if ddp:
        dist.init_process_group("nccl" if device != "cpu" else "gloo")
    torch.manual_seed(1337)

    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(letter) for letter in TEXT])
    model = GPT(len(letters)).to(device)
    if ddp:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    order = torch.Generator().manual_seed(0)  # the same on all ranks, so that each takes its share of the same pieces
    for _ in range(STEPS):
        begins = torch.randint(len(text) - LENGTH, (PIECES,), generator=order)[rank::world_size]
        x = torch.stack([text[begin : begin + LENGTH] for begin in begins]).to(device)
        y = torch.stack([text[begin + 1 : begin + LENGTH + 1] for begin in begins]).to(device)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    mean = loss.detach().clone()
    if ddp:
        dist.all_reduce(mean)
    norm = torch.stack([parameter.detach().norm() for parameter in model.parameters()]).norm()
    result = {"rank": rank, "world_size": world_size, "loss": mean.item() / world_size, "norm": norm.item()}
    sys.stdout.write(json.dumps(result) + "\n")
    if ddp:
        dist.barrier()  # no rank leaves while another still communicates
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
