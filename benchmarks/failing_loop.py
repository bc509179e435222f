"""The training of failures.py: short steps of a small model, whose state flk, torch's DCP or torchft keeps.

    python benchmarks/failing_loop.py STEPS MILLISECONDS flk|dcp
    python benchmarks/failing_loop.py STEPS MILLISECONDS torchft RANK LIGHTHOUSE

A step takes at least so many milliseconds: each rank sleeps for the rest, as if a device worked. The batch of a rank
depends on the step alone, so that each step has one right loss. The first rank appends a line to the file ``losses``
after each step: its number, the time, and the loss. Each rank has its process id in a file.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

DCP_EVERY = 10  # steps between two checkpoints of DCP, which wait for their files
KEPT = 2  # checkpoints


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same at the start of each process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model, torch.optim.AdamW(model.parameters())


class Pace:
    """Makes steps that take at least as long as is asked for, and tells the first rank's losses."""

    def __init__(self, rank: int, milliseconds: float) -> None:
        self._rank, self._seconds = rank, milliseconds / 1000
        Path(f"pid.{rank}").write_text(str(os.getpid()))

    def step(self, number: int, model: nn.Module, optimizer: Any) -> torch.Tensor:
        """Train on the batch of step ``number``, from 1. Returns the loss of this rank."""
        began = time.monotonic()
        generator = torch.Generator().manual_seed(1000 * number + self._rank)
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.randn(32, 64, generator=generator)) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(max(0.0, self._seconds - (time.monotonic() - began)))
        return loss.detach()

    @staticmethod
    def tell(number: int, loss: torch.Tensor) -> None:
        """Write the line of a step. One write, which a kill does not divide."""
        with open("losses", "a") as file:
            file.write(f"{number} {time.time()} {float(loss).hex()}\n")


def train_with_flk(steps: int, milliseconds: float) -> None:
    """A save in each step, in the memory of the launchers.

    parallelize gives DDP the buckets from the start that it otherwise makes after its first step. With those of a
    script's own DDP the step after a restart would sum the ranks' gradients in another order, and so would its peers.
    """
    import flk_runtime as flk

    with flk.init(device="cpu", save_every=1, log_every=0) as run:
        model, optimizer = run.parallelize(*model_and_optimizer())
        pace = Pace(run.rank, milliseconds)
        while run.steps < steps:
            loss = pace.step(run.steps + 1, model, optimizer)
            run.step()
            if run.rank == 0:
                pace.tell(run.steps, loss)


def train_with_dcp(steps: int, milliseconds: float) -> None:
    """A checkpoint of torch.distributed.checkpoint in the folder ``checkpoint`` every DCP_EVERY steps."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path("checkpoint")
    model, optimizer = model_and_optimizer()
    model = nn.parallel.DistributedDataParallel(model)

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    whole = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
    dist.barrier()  # all have looked before one of them saves
    begin = whole[-1] if whole else 0
    if begin:
        found = state()
        load(found, checkpoint_id=str(folder / str(begin)))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    pace = Pace(rank, milliseconds)
    for number in range(begin + 1, steps + 1):
        loss = pace.step(number, model, optimizer)
        if rank == 0:
            pace.tell(number, loss)
        if number % DCP_EVERY == 0:
            save(state(), checkpoint_id=str(folder / str(number)))
            old = folder / str(number - KEPT * DCP_EVERY)
            if rank == 0 and old.exists():
                shutil.rmtree(old)
    dist.destroy_process_group()


def train_with_torchft(steps: int, milliseconds: float, rank: int, lighthouse: str) -> None:
    """Each rank is a replica by itself. The others go on without one that is lost, which gets their state later."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain, inner = model_and_optimizer()

    def load(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    limit = timedelta(seconds=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{rank}",
    )
    model, optimizer = DistributedDataParallel(manager, plain), Optimizer(manager, inner)
    pace = Pace(rank, milliseconds)
    while manager.current_step() < steps:
        loss = pace.step(manager.current_step() + 1, model, optimizer)
        if manager.participating_rank() == 0:
            pace.tell(manager.current_step(), loss)
    manager.shutdown(wait=False)
    os._exit(0)  # the manager's threads may wait for replicas that have ended


TRAIN: dict[str, Callable[..., None]] = {"flk": train_with_flk, "dcp": train_with_dcp, "torchft": train_with_torchft}


def main() -> None:
    steps, milliseconds, keeper, *rest = sys.argv[1:]
    values: Iterator[Any] = iter(rest)
    more = [int(next(values)), next(values)] if rest else []
    TRAIN[keeper](int(steps), float(milliseconds), *more)


if __name__ == "__main__":
    main()
