"""Time from the SIGKILL of a rank to the next finished step, under flk and under torchrun: same script, same machine.

    python benchmarks/recovery.py [--repeat 5] [--ranks 4]

torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: with the defaults of torch 2.13 its restarts do not recover.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

STEPS_BEFORE = 20  # of the first attempt, so that everything is warm when the rank is killed
WAIT = 120.0  # seconds for any one thing to happen

SCRIPT = textwrap.dedent(
    f"""
    import os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    with open(f"steps.{{attempt}}.{{rank}}", "w", buffering=1) as steps:
        print(os.getpid(), file=steps)
        for step in range({STEPS_BEFORE} if attempt != "0" else 100_000):
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(time.time(), file=steps)
    dist.destroy_process_group()
    """
)


def flk(ranks: int) -> tuple[list[str], dict[str, str]]:
    """How flk starts the script: command and variables."""
    command = [sys.executable, "-m", "flk_runtime", "--", "train.py"]
    return command, {"FLK_PROCESSES": str(ranks), "FLK_RESTARTS": "1"}


def torchrun(ranks: int) -> tuple[list[str], dict[str, str]]:
    """How torchrun starts the script."""
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py"]
    return command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def lines(path: Path, least: int) -> list[str]:
    """The lines of a file as soon as there are so many."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        found = path.read_text().splitlines() if path.exists() else []
        if len(found) >= least:
            return found
        time.sleep(0.005)
    raise SystemExit(f"{path.name} did not come to {least} lines in {WAIT:.0f} s")


def recovery(command: list[str], variables: dict[str, str], ranks: int) -> float:
    """Seconds from the kill of the last rank to the first step that all ranks have finished afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        job = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            pid = int(lines(folder / f"steps.0.{ranks - 1}", STEPS_BEFORE)[0])
            killed = time.time()
            os.kill(pid, signal.SIGKILL)
            first = max(float(lines(folder / f"steps.1.{rank}", 2)[1]) for rank in range(ranks))
            # torchrun now and then ends with 1 although all its ranks have ended well.
            if job.wait(WAIT) != 0 and command[2] == "flk_runtime":
                raise SystemExit(f"flk ended with {job.returncode}")
            return first - killed
        finally:
            job.kill()
            job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"flk": [], "torchrun": []}
    for _ in range(arguments.repeat):
        for launcher in (flk, torchrun):
            seconds = recovery(*launcher(arguments.ranks), arguments.ranks)
            times[launcher.__name__].append(seconds)
            print(f"{launcher.__name__:9} {seconds:6.3f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"median: flk {medians['flk']:.3f} s, torchrun {medians['torchrun']:.3f} s, {arguments.ranks} ranks")
    print(f"ratio recovery {medians['flk'] / medians['torchrun']:.3f} goal 0.2 (lower is better)")


if __name__ == "__main__":
    main()
