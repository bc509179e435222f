"""The two models that gpu.py trains: one like GPT-2 with 124 million parameters, one like Llama with 1.4 billion.

The names with tiny- before them are the same modules with small sizes, to try the benchmark without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and of what it trains on."""

    layers: int
    width: int
    heads: int
    hidden: int  # width of the feed-forward network
    vocabulary: int
    length: int  # tokens of a sequence
    batch: int  # sequences of a step
    rotary: bool  # as Llama: rotary positions, RMSNorm, a gated network and a head of its own


MODELS: Final = {
    "gpt": Shape(12, 768, 12, 3072, 50304, 1024, 16, rotary=False),
    "llama": Shape(24, 2048, 16, 5632, 32000, 2048, 4, rotary=True),
    "tiny-gpt": Shape(2, 64, 4, 128, 256, 32, 4, rotary=False),
    "tiny-llama": Shape(3, 96, 4, 192, 512, 32, 2, rotary=True),
}


class Block(nn.Module):
    """A transformer layer with causal attention. ``angles``: cosine and sine of rotary positions, or nothing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, biased = shape.width, not shape.rotary
        self.heads, self.gated = shape.heads, shape.rotary
        norm = nn.RMSNorm if shape.rotary else nn.LayerNorm
        self.attention_norm, self.network_norm = norm(width), norm(width)
        self.joint = nn.Linear(width, 3 * width, bias=biased)
        self.output = nn.Linear(width, width, bias=biased)
        self.up = nn.Linear(width, shape.hidden * (1 + self.gated), bias=biased)
        self.down = nn.Linear(shape.hidden, width, bias=biased)

    def forward(self, x: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
        joint = self.joint(self.attention_norm(x))
        query, key, value = joint.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        if angles:
            query, key = rotated(query, *angles), rotated(key, *angles)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        hidden = self.up(self.network_norm(x))
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        changed: torch.Tensor = self.down(hidden)
        return x + changed


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """``x``, of shape (batch, heads, length, width of a head), with rotary position embedding."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Transformer(nn.Module):
    """A language model. Maps tokens, int64 of shape (batch, length + 1), to the loss of predicting each from those
    before it.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.rotary else nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm: nn.Module = nn.RMSNorm(shape.width) if shape.rotary else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if not shape.rotary:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        angles: tuple[torch.Tensor, ...] = ()
        places = torch.arange(self.shape.length, device=tokens.device)
        if self.positions is not None:
            x = x + self.positions(places)
        else:
            half = self.shape.width // self.shape.heads // 2
            speeds = 10_000.0 ** (-torch.arange(half, device=tokens.device) / half)
            turned = torch.outer(places.float(), speeds)
            angles = turned.cos(), turned.sin()
        for block in self.blocks:
            x = block(x, *angles)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make(name: str) -> Transformer:
    """A model of MODELS, on torch's default device."""
    return Transformer(MODELS[name])


def tokens_of(name: str, sequences: int | None = None) -> torch.Tensor:
    """Random tokens for a model, on the CPU: a batch, or so many sequences."""
    shape = MODELS[name]
    return torch.randint(shape.vocabulary, (sequences or shape.batch, shape.length + 1), device="cpu")
