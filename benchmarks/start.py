"""Measure the time from the launch of a job to its first all-reduce, under flk's launcher and under torchrun.

    python benchmarks/start.py [--rounds 8] [--ranks 8] [--cores 1 2]

Both start the same script as processes of this machine; flk's launcher runs as it does in a pod. The time ends when the
last rank has finished. There are two scripts: one only opens the process group and does an all-reduce; the other also
trains a DistributedDataParallel model for one step with an optimizer, which imports much more of torch. Each script is
measured on 1, 2, 4 … cores, up to all cores of the machine. Goal: at most a quarter of torchrun's time for 8 ranks.
Fewer ranks gain less from sharing one import of torch; --goal sets their goal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import launch
import measure

LIMIT = 300.0  # seconds for one job

BEGIN = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == dist.get_world_size()
"""
TRAIN = """
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(8, 64)).square().mean().backward()
optimizer.step()
"""
END = """
done = time.time()
with open(f"done.{rank}", "w") as file:
    file.write(str(done))
dist.destroy_process_group()
"""
SCRIPTS = {"first all-reduce": BEGIN + END, "first optimizer step": BEGIN + TRAIN + END}


def seconds_to_start(launcher: launch.Launcher, script: str, ranks: int, cores: Sequence[int]) -> float:
    """Seconds from the start of the launcher until the last rank has finished the script's work."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(textwrap.dedent(script))
        (process,) = launcher(["train.py"], ranks, 1, 0)
        began = time.time()
        job = process.start(
            folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        try:
            errors = job.communicate(timeout=LIMIT)[1]
        finally:
            job.kill()
        if job.returncode:
            raise SystemExit(f"{process.command[2]} ended with {job.returncode}:\n{errors.decode(errors='replace')}")
        return max(float((folder / f"done.{rank}").read_text()) for rank in range(ranks)) - began


def main() -> int:
    usable = sorted(os.sched_getaffinity(0))
    counts = [2**power for power in range(8) if 2**power < len(usable)] + [len(usable)]
    parser = measure.parser(__doc__, rounds=8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cores", type=int, nargs="+", default=counts, help="numbers of cores to measure on")
    parser.add_argument("--goal", type=float, default=0.25, help="the largest ratio to torchrun's time")
    arguments = parser.parse_args()
    report = measure.Report("start", arguments)
    for name, script in SCRIPTS.items():
        for cores in arguments.cores:
            chosen = usable[:cores]
            measure.progress(f"{name}, {arguments.ranks} ranks on {cores} cores")
            cases = {
                "flk": partial(seconds_to_start, launch.flk, script, arguments.ranks, chosen),
                "torchrun": partial(seconds_to_start, launch.torchrun, script, arguments.ranks, chosen),
            }
            what = f"time to {name}, {arguments.ranks} ranks on {cores} core{'s' * (cores != 1)}"
            report.measure(what, cases, arguments.rounds, measure.at_most(arguments.goal), "s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
