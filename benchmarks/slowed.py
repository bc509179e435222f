"""The training of slow_ranks.py: a small model whose steps take a second, and some of whose ranks become slower.

    slowed.py WAY FIRST STEPS RANK …

WAY is what becomes slower in these ranks from step FIRST on: the rank's own work in a step, or the making of its data.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn

import flk_runtime as flk

STEP = 1.0  # seconds of a rank's own work in a step, in which a device would work
FACTOR = 1.3  # of the work of a slow rank
MORE = STEP * (FACTOR - 1)


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Samples, of which those after the first ones are slow to make."""

    def __init__(self, first: int) -> None:
        self._first, self._made = first, 0

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        self._made += 1
        if self._made > self._first:
            time.sleep(MORE)
        return torch.full((16,), index / 4096)


def main() -> None:
    way, first, steps, *ranks = sys.argv[1], *(int(word) for word in sys.argv[2:])
    slow = int(os.environ["RANK"]) in ranks
    with flk.init(device="cpu", log_every=1) as run:
        plain = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        model, optimizer = run.parallelize(plain, torch.optim.AdamW(plain.parameters()))
        data = Data(first if slow and way == "data" else steps)
        loader: Any = run.loader(data, batch_size=1)
        for made, x in enumerate(loader.steps(steps)):
            time.sleep(STEP + MORE * (slow and way == "work" and made >= first))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            run.step()


if __name__ == "__main__":
    main()
