"""The training of diagnosis.py: a small model whose ranks run into the faults that they find in the file ``fault``.

The file has a line of JSON: the rank, the place in the training, and the module whose function `fail` is the fault.
The rank removes it first, so that the fault happens once, and writes the moment into ``happened``. The file
``progress.RANK`` has the attempt of a rank, its steps there, and its process id.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

PAUSE = 0.02  # seconds of a step in which a device would work
SLOWER = 0.04  # seconds that a slow rank works longer in each step, which makes its work about 2 times as long


def run_into(place: str) -> None:
    """Make the fault that is due for this rank at this place, if there is one."""
    try:
        fault = json.loads(Path("fault").read_text())
    except (FileNotFoundError, ValueError):
        return
    if fault["rank"] != int(os.environ["RANK"]) or fault["place"] != place:
        return
    os.remove("fault")
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    fail = importlib.import_module(fault["module"]).fail
    Path("happened").write_text(str(time.time()))
    fail()


def compute(seconds: float) -> None:
    """Use the processor for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def write(seconds: float) -> None:
    """Write a file for so long, and have the disk keep it."""
    end = time.monotonic() + seconds
    with open(f"slow.{os.getpid()}", "wb") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())


slow: Callable[[float], None] | None = None  # the work that a slow rank does in each step


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that a worker process makes."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        run_into("sample")
        return torch.full((16,), index / 4096)


class Model(nn.Module):
    """Two layers, with a place for a fault in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run_into("forward")
        y: torch.Tensor = self.layers(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: run_into("backward"))  # type: ignore[no-untyped-call]
        return y


def main() -> None:
    import flk_runtime as flk

    with flk.init(device="cpu", save_every=5, log_every=50) as run:
        plain = Model()
        model, optimizer = run.parallelize(plain, torch.optim.AdamW(plain.parameters()))
        loader: Any = run.loader(Data(), batch_size=8, num_workers=1)
        for made, x in enumerate(loader.steps(1_000_000), 1):
            run_into("step")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            run.step()
            time.sleep(PAUSE)
            if slow:
                slow(SLOWER)
            Path(f"progress.{run.rank}").write_text(f"{run.attempt} {made} {os.getpid()}")
