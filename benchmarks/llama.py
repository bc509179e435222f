"""Llama 3.1 as torchtitan trained it for its published figures of December 2024, as a script for `flk plan`.

    flk plan benchmarks/llama.py --replicas 1 --gpu 8 --gpu-type h100-96gb -- --size 8b

The shapes are the same as in the published models. Rotary embeddings and norms compute in float32 with separate
kernels, as torch did then. `--recompute operations` keeps attention and every second matrix product and computes
everything else again, `layers` computes every second layer again, and `all` every layer.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flk_runtime as flk

VOCABULARY = 128_256
LENGTH = 8192
# Layers, width, heads, key and value heads, width of the feed-forward network.
SIZES = {"8b": (32, 4096, 32, 8, 14336), "70b": (80, 8192, 64, 8, 28672)}
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``x``, of shape (batch, length, heads, width of a head), with rotary position embedding."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Block(nn.Module):
    """A transformer layer with grouped-query attention and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.shared, self.head = heads, shared, width // heads
        self.attention_norm, self.network_norm = Norm(width), Norm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.head, bias=False)
        self.value = nn.Linear(width, shared * self.head, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        repeats = self.heads // self.shared
        return x[:, :, :, None].expand(-1, -1, -1, repeats, -1).flatten(2, 3)

    def attend(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        query = rotated(self.query(x).view(*x.shape[:-1], self.heads, self.head), angles)
        key = self.repeated(rotated(self.key(x).view(*x.shape[:-1], self.shared, self.head), angles))
        value = self.repeated(self.value(x).view(*x.shape[:-1], self.shared, self.head))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: torch.Tensor = self.output(mixed.transpose(1, 2).contiguous().flatten(2))
        return joined

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x), angles)
        normed = self.network_norm(x)
        changed: torch.Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + changed


class Llama(nn.Module):
    """Maps tokens, int64 of shape (batch, length), to logits of shape (batch, length, vocabulary)."""

    def __init__(self, layers: int, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, shared, hidden) for _ in range(layers))
        self.norm = Norm(width)
        self.scores = nn.Linear(width, VOCABULARY, bias=False)
        self.angles = torch.ones(1, LENGTH, 1, width // heads // 2, dtype=torch.complex64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        logits: torch.Tensor = self.scores(self.norm(x))
        return logits


def selective() -> Any:
    """Contexts for torch's checkpoint: keep attention and every second matrix product."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation in ATTENTION
        if operation == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Any = create_selective_checkpoint_contexts
    return contexts(policy)


def recomputed(forward: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    """A block's forward pass with recomputation."""
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--recompute", choices=("operations", "layers", "all"), default="operations")
    arguments = parser.parse_args()
    options = {"context_fn": selective} if arguments.recompute == "operations" else {}
    with flk.init() as run:
        model: nn.Module = Llama(*SIZES[arguments.size])
        for number, block in enumerate(each for each in model.modules() if isinstance(each, Block)):
            if arguments.recompute != "layers" or number % 2:
                block.forward = functools.partial(recomputed, block.forward, options)  # type: ignore[method-assign]
        optimizer = torch.optim.AdamW(model.parameters())
        precision = flk.Precision(output=torch.bfloat16)
        model, optimizer = run.parallelize(model, optimizer, blocks="Block", precision=precision)
        tokens = torch.zeros(arguments.batch, LENGTH, dtype=torch.int64, device=run.device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        run.step(loss)


if __name__ == "__main__":
    main()
