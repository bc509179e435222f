"""A character-level GPT that learns to write Python from the sources of Python's own standard library.

    flk run --replicas 4                                # 4 processes on this machine
    flk submit --replicas 4                             # 4 pods in a cluster
    torchrun --nproc-per-node 2 examples/gpt/train.py   # flk's launcher is not needed …
    python examples/gpt/train.py                        # … and neither is any other

Everything that has to do with several processes is in the lines with `run`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys

import torch
import torch.nn.functional as F
from torch import nn

import flk_runtime as flk

# Modules whose text is the same in CPython 3.10, 3.11 and 3.12 (compared in 3.10.13, 3.11.2, 3.11.7 and 3.12.1), so
# that a run here and one in a pod with another Python train on the same data and give the same loss. The hash of the
# data is printed, so a difference shows.
MODULES = (
    "_compression _markupbase _osx_support _py_abc _threading_local bz2 difflib getpass hmac linecache lzma optparse "
    "pickletools pyclbr queue sched shelve stat stringprep tracemalloc"
)
HELD_OUT = 20  # every 20th piece of the text is not trained on


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character-level GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, those before a resume included")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of text per process and step")
    parser.add_argument("--block", type=int, default=64, help="characters in a piece: how far the model looks back")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="numbers that stand for a character")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    return parser.parse_args()


def read_text() -> str:
    """The text of MODULES, one after the other. A module that this Python has not is left out."""
    folder = os.path.dirname(os.__file__)
    texts = []
    for name in MODULES.split():
        path = os.path.join(folder, name + ".py")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                texts.append(file.read())
    if not texts:
        sys.exit(f"there are no sources of Python's standard library in {folder}")
    return "".join(texts)


class Pieces(torch.utils.data.Dataset):
    """Pieces of a text and, for each of their characters, the one that follows: two int64 tensors of shape (block,)."""

    def __init__(self, characters: torch.Tensor, block: int, numbers: list[int]) -> None:
        self.characters, self.block, self.numbers = characters, block, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.numbers[index] * self.block
        piece = self.characters[begin : begin + self.block + 1]
        return piece[:-1], piece[1:]


class Layer(nn.Module):
    """Attention to the characters before, then a small network for each character; each adds to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_network = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm_attention(x)))
        return x + self.drop(self.network(self.norm_network(x)))


class GPT(nn.Module):
    """From characters, shape (batch, length), to the scores of each next one, shape (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, block: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[1], device=x.device)
        return self.scores(self.norm(self.layers(self.drop(self.characters(x) + self.positions(position)))))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Pieces, run: flk.Run) -> float:
    """The mean over all pieces in ``data``, of which each process looks at its share."""
    model.eval()
    share = [data[number] for number in range(run.rank, len(data), run.world_size)]
    loss = 0.0
    # As many passes on every rank: where the model is sharded, a pass is one of all ranks together.
    for begin in range(0, -(-len(data) // run.world_size), 64):
        batch = share[begin : begin + 64]
        x, y = (torch.stack(tensors).to(run.device) for tensors in zip(*(batch or [data[0]]), strict=True))
        loss += loss_of(model, x, y).item() * len(batch)
    model.train()
    return run.mean(loss / max(1, len(share)), weight=len(share))


def main() -> None:
    args = options()
    with flk.init() as run:
        text = read_text()
        letters = sorted(set(text))
        number_of = {letter: number for number, letter in enumerate(letters)}
        characters = torch.tensor([number_of[letter] for letter in text])
        pieces = range((len(text) - 1) // args.block)
        training = Pieces(characters, args.block, [n for n in pieces if n % HELD_OUT])
        held_out = Pieces(characters, args.block, [n for n in pieces if n % HELD_OUT == 0])

        model = GPT(len(letters), args.block, args.layers, args.heads, args.width, args.dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        model, optimizer = run.parallelize(model, optimizer)
        loader = run.loader(training, args.batch_size)
        run.log(
            processes=run.world_size,
            characters=len(text),
            vocabulary=len(letters),
            data=hashlib.sha256(text.encode()).hexdigest()[:16],
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            heldout_loss=held_out_loss(model, held_out, run),
        )
        place = {"rank": run.rank, "device": str(run.device), "host": socket.gethostname()}
        sys.stdout.write(json.dumps(place) + "\n")  # in one piece: all processes write at the same time
        # The loader goes on where a snapshot was written, and so does everything else.
        for x, y in loader.steps(args.steps):
            loss = loss_of(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
        run.log(heldout_loss=held_out_loss(model, held_out, run))


if __name__ == "__main__":
    main()
