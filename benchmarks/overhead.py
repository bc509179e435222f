"""Steps per second of the example under flk and under torchrun: same script, same ranks, same machine, by turns.

    python benchmarks/overhead.py [--repeat 5] [--ranks 2] [--steps 150]

Counted from the metrics that rank 0 prints, after the first steps, so neither start nor imports are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt" / "train.py"
WARM = 20  # steps that are not counted


def launchers(ranks: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """How each launcher starts the script: command and variables."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return {
        "flk": ([sys.executable, "-m", "flk_runtime", "--"], {"FLK_PROCESSES": str(ranks)}),
        "torchrun": (torchrun, {}),
    }


def steps_per_second(command: list[str], variables: dict[str, str], steps: int) -> float:
    """Run the example and return its rate between step WARM and the last."""
    seen: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen(
            [*command, str(EXAMPLE), "--steps", str(steps)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with job:
            for line in job.stdout or []:
                now = time.monotonic()
                _, brace, rest = line.partition("{")
                record = json.loads(brace + rest) if brace else {}
                if "step" in record and "loss" in record:
                    seen[record["step"]] = now
    if job.returncode != 0 or WARM not in seen:
        raise SystemExit(f"{' '.join(command[1:3])} ended with {job.returncode} after steps {sorted(seen)}")
    last = max(seen)
    return (last - WARM) / (seen[last] - seen[WARM])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"flk": [], "torchrun": []}
    for _ in range(arguments.repeat):
        for name, (command, variables) in launchers(arguments.ranks).items():
            rates[name].append(steps_per_second(command, variables, arguments.steps))
            print(f"{name:9} {rates[name][-1]:7.2f} steps/s", flush=True)
    # Neighbours in time are compared, so that what else the machine does weighs on both alike.
    ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["flk"], rates["torchrun"], strict=True))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"median: flk {medians['flk']:.2f}, torchrun {medians['torchrun']:.2f} steps/s, {arguments.ranks} ranks")
    print(f"ratio steps-per-second {ratio:.3f} goal 0.98 (higher is better)")


if __name__ == "__main__":
    main()
