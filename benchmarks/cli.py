"""How long flk's commands take as whole processes, each as a ratio to `kubectl version --client` in the same run.

    python benchmarks/cli.py [--rounds 20] [--flk PATH]

The commands run in turn, round after round, so that whatever else the machine does hits all of them alike. A ratio is
that of the medians of wall time; the CPU time (user and system, of the process and its children) stands beside it. Ends
with 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REFERENCE = "kubectl version --client"
GOALS = {"flk --version": 1.5, "flk --help": 2.0, "flk render, 4 replicas": 4.0, "flk render, 1000 replicas": 5.0}


def commands(flk: str) -> dict[str, list[str]]:
    render = [flk, "render", "train.py", "--name", "bench"]
    return {
        REFERENCE: ["kubectl", "version", "--client"],
        "flk --version": [flk, "--version"],
        "flk --help": [flk, "--help"],
        "flk render, 4 replicas": [*render, "--replicas", "4"],
        "flk render, 1000 replicas": [*render, "--replicas", "1000"],
    }


def once(command: list[str], folder: str) -> tuple[float, float]:
    """Seconds of wall and of CPU time of one process."""
    before = os.times()
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - start
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="runs of each command")
    parser.add_argument("--flk", default=str(Path(sys.executable).parent / "flk"), help="the flk to measure")
    options = parser.parse_args()
    todo = commands(options.flk)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in todo}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text("print('hello')\n")
        for number in range(options.rounds + 1):
            for name, command in todo.items():
                measured = once(command, folder)
                if number:  # the first round fills the caches
                    times[name].append(measured)
    walls = {name: statistics.median(wall for wall, _ in runs) for name, runs in times.items()}
    cpus = {name: statistics.median(cpu for _, cpu in runs) for name, runs in times.items()}
    for name in todo:
        print(f"{name:<28} {walls[name] * 1000:6.0f} ms wall  {cpus[name] * 1000:6.0f} ms CPU")
    missed = False
    for name, goal in GOALS.items():
        for kind, of in (("wall", walls), ("CPU", cpus)):
            ratio = of[name] / of[REFERENCE]
            missed |= ratio > goal
            print(f"ratio {name} ({kind}) {ratio:.2f} goal {goal:g} (lower is better)")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
