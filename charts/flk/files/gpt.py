"""Train a character-level GPT on the source files of Python's own standard library.

    flk run --replicas 4                                # 4 processes on this machine
    flk submit --replicas 4                             # 4 pods in a cluster
    torchrun --nproc-per-node 2 examples/gpt/train.py   # under another launcher
    python examples/gpt/train.py                        # one process, no launcher

The lines with `run` are all that a script needs to train with several processes.
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

# The text of these modules is the same in CPython 3.10, 3.11 and 3.12 (compared in 3.10.13, 3.11.2, 3.11.7 and 3.12.1),
# so that runs under different versions of Python train on the same data and give the same loss. The hash of the data is
# printed, so that a difference is visible.
MODULES = (
    "_compression _markupbase _osx_support _py_abc _threading_local bz2 difflib getpass hmac linecache lzma optparse "
    "pickletools pyclbr queue sched shelve stat stringprep tracemalloc"
)
HELD_OUT = 20  # every 20th piece of the text is held out for evaluation


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character-level GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of text per process and step")
    parser.add_argument("--block", type=int, default=64, help="characters in a piece of text (the context length)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="embedding dimension")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--evaluate-every", type=int, default=0, help="steps between two held-out losses; 0: at the end"
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    return parser.parse_args()


def read_text() -> str:
    """The concatenated source text of MODULES, without those that this Python does not have."""
    folder = os.path.dirname(os.__file__)
    texts = []
    for name in MODULES.split():
        path = os.path.join(folder, name + ".py")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                texts.append(file.read())
    if not texts:
        sys.exit(
            f"found no source files of Python's standard library in {folder}: use a Python that is installed with them"
        )
    return "".join(texts)


class Pieces(torch.utils.data.Dataset):
    """A piece of text and, for each character, the next one, as int64 tensors of shape (block,)."""

    def __init__(self, characters: torch.Tensor, block: int, numbers: list[int]) -> None:
        self.characters, self.block, self.numbers = characters, block, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self.numbers[index] * self.block
        piece = self.characters[begin : begin + self.block + 1]
        return piece[:-1], piece[1:]


class Layer(nn.Module):
    """A transformer layer: causal self-attention, then a two-layer network, both with residual connections."""

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
    """Maps characters, int64 of shape (batch, length), to logits of the next one, (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, block: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        self.initialize()

    def initialize(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[1], device=x.device)
        return self.scores(self.norm(self.layers(self.drop(self.characters(x) + self.positions(position)))))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, evaluation: flk.EvaluationLoader, run: flk.Run) -> float:
    """The mean loss over all pieces of ``evaluation``; each rank evaluates its share. Collective."""
    model.eval()
    losses, counts = [], []
    for (x, y), count in evaluation:
        losses.append(loss_of(model, x, y))
        counts.append(count)
    model.train()
    return run.mean(losses, weight=counts)


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
        evaluation = run.evaluation(held_out, batch_size=64)

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
            heldout_loss=held_out_loss(model, evaluation, run),
        )
        location = {"rank": run.rank, "device": str(run.device), "host": socket.gethostname()}
        sys.stdout.write(json.dumps(location) + "\n")  # one write, because all processes write at the same time
        # After a restart, the loader continues from the position in the checkpoint, as model and optimizer do.
        for x, y in loader.steps(args.steps):
            loss = loss_of(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
            if args.evaluate_every and run.steps % args.evaluate_every == 0 and run.steps < args.steps:
                run.log(heldout_loss=held_out_loss(model, evaluation, run))
        run.log(heldout_loss=held_out_loss(model, evaluation, run))


if __name__ == "__main__":
    main()
