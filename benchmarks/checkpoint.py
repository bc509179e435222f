"""Measure checkpoints of a large state: how long training stops, the memory they take, and how long resuming takes.

    python benchmarks/checkpoint.py [--rounds 6] [--ranks 4] [--gigabytes 1.0]

The ranks train a model under DDP on this machine; the state is its parameters and AdamW's averages. In each round
every way of saving is measured once, as the time until the slowest rank may go on. Goals: at most 0.05 of torch.save on
rank 0 while the others wait, at most the time of a hand-written torch.distributed.checkpoint.async_save, and at most
1.3 times the time in which the ranks copy as many bytes from memory to memory, a lower bound for every way that copies.
These are saves from the ninth on. The second to the seventh also compare a part of what the ranks hold alike; they are
measured before, beside the copy, goal 2.0.
The memory that the first save of new ranks adds to one is compared with its share of the state, goal 2.2. Resuming from
the checkpoint is compared with torch.load on rank 0 and a broadcast, goal 1.0.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import flk_runtime as flk
import launch
import measure
from flk_runtime.distributed import process_group

WIDTH = 2048
COMPARED = 6  # saves from the second on, which are measured apart; one more warms up


def timed(action: Callable[[], object]) -> float:
    """Seconds that ``action`` takes on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def peak_memory() -> int:
    """The largest resident memory of this process since the last call of `reset_peak`, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def begin(rank: int, ranks: int, port: int, size: float) -> tuple[DistributedDataParallel, torch.optim.Optimizer, int]:
    """Make the process group, and a model and an optimizer that have stepped; return both and their bytes of state."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("cpu:gloo")
    layers = max(1, round(size * 1e9 / 12 / WIDTH**2))
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, sum(p.numel() for p in model.parameters()) * 12


def run_first_save(rank: int, ranks: int, port: int, size: float, folder: str, answer: str) -> None:
    """Measure the memory that the first save adds, the only one that takes new memory, as `run_rank` answers."""
    model, optimizer, state = begin(rank, ranks, port, size)
    reset_peak()
    before = peak_memory()
    flk.save(1, checkpoint=Path(folder, "flk"), wait=True, model=model, optimizer=optimizer)
    share = torch.tensor((peak_memory() - before) / (state / ranks))
    dist.all_reduce(share, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(answer).write_text(json.dumps(float(share)))
    process_group.leave(at_once=False)  # destroy_process_group alone sometimes aborts a process that ends


def run_rank(rank: int, ranks: int, port: int, size: float, folder: str, answer: str, rounds: int) -> None:
    """Measure all rounds of the times; rank 0 writes the values as JSON to the file ``answer``."""
    model, optimizer, state = begin(rank, ranks, port, size)
    own = Path(folder)
    group = dist.new_group(backend="gloo")
    source = torch.ones(state // ranks // 4)
    target = source.clone()

    def save_with_torch() -> None:
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, own / "whole.pt")
        dist.barrier()

    def load_with_torch() -> None:
        if rank == 0:
            content = torch.load(own / "whole.pt", weights_only=True)
            model.module.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optimizer"])
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
            for _, value in sorted(optimizer.state[parameter].items()):  # a restore and a load make different orders
                dist.broadcast(value, src=0)

    def save_async() -> Any:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        content = {"model": model_state, "optimizer": optimizer_state}
        return async_save(content, checkpoint_id=own / "async", process_group=group)

    flk.save(1, checkpoint=own / "flk", wait=True, model=model, optimizer=optimizer)
    steps = itertools.count(2)

    def save_with_flk() -> float:
        step = next(steps)
        seconds = timed(partial(flk.save, step, checkpoint=own / "flk", model=model, optimizer=optimizer))
        wait_until_written(own / "flk", step)
        return seconds

    def copy() -> float:
        return timed(lambda: target.copy_(source))

    def save_with_torch_async() -> float:
        pending: list[Any] = []
        seconds = timed(lambda: pending.append(save_async()))
        pending.pop().result()
        return seconds

    early = measure.alternate({"flk": save_with_flk, "copy": copy}, min(rounds, COMPARED), show=None)
    save_with_torch()  # in the first round it is read before it is written
    # Restored from a place of its own: to go back in the place of the saves frees the memory that they use again.
    flk.save(1, checkpoint=own / "restored", wait=True, model=model, optimizer=optimizer)
    found = measure.alternate(
        {
            "torch.save": partial(timed, save_with_torch),
            "flk": save_with_flk,
            "copy": copy,
            "async_save": save_with_torch_async,
            "torch.load": partial(timed, load_with_torch),
            "restore": partial(timed, lambda: flk.restore(own / "restored", model=model, optimizer=optimizer)),
        },
        rounds,
        warmup=1,
        show="{:.3f} s".format if rank == 0 else None,
    )
    if rank == 0:
        Path(answer).write_text(json.dumps({**found, "early": early, "state": state}))
    process_group.leave(at_once=False)  # destroy_process_group alone sometimes aborts a process that ends


def wait_until_written(folder: Path, step: int) -> None:
    """Wait until the ranks have written the checkpoint of a step and removed the one that it makes outdated.

    A save that comes earlier waits for both.
    """
    for thread in threading.enumerate():
        if thread.name == "flk-checkpoint":
            thread.join()
    assert (folder / "latest").read_text().split()[0] == f"step-{step:09d}"
    dist.barrier()


def answer_of(run: Callable[..., None], ranks: int, size: float, *options: int) -> Any:
    """Start ranks that ``run`` this function in a folder of their own. Returns the answer of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        answer = f"{folder}/answer"
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
        given = (ranks, port, size, folder, answer, *options)
        start_processes(run, given, nprocs=ranks, start_method="spawn")  # type: ignore[no-untyped-call]
        return json.loads(Path(answer).read_text())


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    arguments = parser.parse_args()
    report = measure.Report("checkpoint", arguments)
    os.environ.update(launch.MEMORY)
    shares = [answer_of(run_first_save, arguments.ranks, arguments.gigabytes) for _ in range(arguments.rounds)]
    found = answer_of(run_rank, arguments.ranks, arguments.gigabytes, arguments.rounds)
    case = f"state of {found['state'] / 1e9:.2f} GB, {arguments.ranks} ranks"
    report.compare(
        f"stop of a save, {case}, flk / torch.save on rank 0",
        found["flk"],
        found["torch.save"],
        measure.at_most(0.05),
        "s",
    )
    report.compare(
        f"stop of a save, {case}, flk / async_save", found["flk"], found["async_save"], measure.at_most(1.0), "s"
    )
    report.compare(
        f"stop of a save, {case}, flk / copy of as many bytes", found["flk"], found["copy"], measure.at_most(1.3), "s"
    )
    early = found["early"]
    report.compare(
        f"stop of a save that compares, {case}, flk / copy of as many bytes",
        early["flk"],
        early["copy"],
        measure.at_most(2.0),
        "s",
    )
    report.compare(
        f"resume, {case}, flk / torch.load and broadcast",
        found["restore"],
        found["torch.load"],
        measure.at_most(1.0),
        "s",
    )
    report.compare(
        f"memory that a save adds to a rank, {case}, flk / its share",
        shares,
        [1.0] * len(shares),
        measure.at_most(2.2),
        "shares",
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
