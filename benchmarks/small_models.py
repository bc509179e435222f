"""Three small models whose strategies `benchmarks/plan.py` measures: python benchmarks/small_models.py NAME.

They differ in what a step spends its time on: `wide` on communication, `deep` on the collectives of many blocks, and
`pixels` on computation.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import flk_runtime as flk


def wide() -> tuple[nn.Module, torch.Tensor]:
    """Large matrices and a small batch: much to communicate for the computation that there is."""
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    return nn.Sequential(*blocks), torch.randn(2048, 512)


def deep() -> tuple[nn.Module, torch.Tensor]:
    """Many small blocks, each with collectives of its own under the sharding strategies."""
    blocks = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(16)]
    return nn.Sequential(*blocks), torch.randn(2048, 128)


def pixels() -> tuple[nn.Module, torch.Tensor]:
    """Convolutions, which compute much with few parameters."""
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 32, 3), *blocks), torch.randn(1024, 3, 24, 24)


MODELS = {each.__name__: each for each in (wide, deep, pixels)}


def main() -> None:
    with flk.init() as run:
        model, data = MODELS[sys.argv[1]]()
        model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
        for x in run.loader(data, batch_size=8).steps(60):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)


if __name__ == "__main__":
    main()
