"""Time from the launch of a job to the end of its first all-reduce, under flk and under torchrun: same script.

    python benchmarks/start.py [--repeat 5] [--ranks 8]

Both start the ranks as processes of this machine. flk is measured as a pod starts it (`python -m flk_runtime`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

WAIT = 300.0  # seconds for one job

SCRIPT = textwrap.dedent(
    """
    import time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    done = time.time()
    assert ones.item() == dist.get_world_size()
    with open(f"done.{dist.get_rank()}", "w") as file:
        file.write(str(done))
    dist.destroy_process_group()
    """
)


def flk(ranks: int) -> tuple[list[str], dict[str, str]]:
    """How flk starts the script: command and variables."""
    return [sys.executable, "-m", "flk_runtime", "--", "train.py"], {"FLK_PROCESSES": str(ranks)}


def torchrun(ranks: int) -> tuple[list[str], dict[str, str]]:
    """How torchrun starts the script."""
    options = ["--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, "train.py"], {}


def start(command: list[str], variables: dict[str, str], ranks: int) -> float:
    """Seconds from the launch to the all-reduce that the last rank has finished."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        began = time.time()
        job = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=WAIT
        )
        if job.returncode:
            raise SystemExit(f"{command[2]} ended with {job.returncode}:\n{job.stderr.decode(errors='replace')}")
        return max(float((folder / f"done.{rank}").read_text()) for rank in range(ranks)) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"flk": [], "torchrun": []}
    for _ in range(arguments.repeat):
        for launcher in (flk, torchrun):
            seconds = start(*launcher(arguments.ranks), arguments.ranks)
            times[launcher.__name__].append(seconds)
            print(f"{launcher.__name__:9} {seconds:6.3f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"median: flk {medians['flk']:.3f} s, torchrun {medians['torchrun']:.3f} s, {arguments.ranks} ranks")
    print(f"ratio start {medians['flk'] / medians['torchrun']:.3f} goal 0.25 (lower is better)")


if __name__ == "__main__":
    main()
