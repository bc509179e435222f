"""`make demo`: train examples/gpt with four processes on this machine, then resume it in a second run.

Exits with 1 unless the held-out loss falls by FALL and the second run starts at the first one's last step.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "reports" / "demo"
STEPS = (150, 200)  # at the end of the first run, and of the second
FALL = 1.5  # nats per character


def train(steps: int) -> list[dict[str, float]]:
    """Train until ``steps`` and pass the output on; return the metrics that rank 0 printed."""
    command = ["flk", "run", "--replicas", "2", "--processes", "2", "--name", "demo"]
    command += ["--checkpoint", "demo:/checkpoints", "--save-every", "50", "--env", "OMP_NUM_THREADS=1"]
    command += ["--", "--steps", str(steps)]
    print("$", *command, flush=True)
    metrics = []
    program = [sys.executable, "-m", *command]
    with subprocess.Popen(program, cwd=FOLDER, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("[rank 0] {"):
                metrics.append(json.loads(line.removeprefix("[rank 0] ")))
    if process.returncode:
        sys.exit(f"demo: `flk run` ended with {process.returncode}")
    return metrics


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    first, second = train(STEPS[0]), train(STEPS[1])
    before, after = first[0]["heldout_loss"], second[-1]["heldout_loss"]
    ended, resumed = int(first[-1]["step"]), int(second[0]["step"])
    between = first[-1]["heldout_loss"]
    print(f"held-out loss: {before:.2f} before, {between:.2f} after the first run, {after:.2f} at the end")
    print(f"the first run ended at step {ended}, the second began at step {resumed}")
    if before - after < FALL:
        sys.exit(f"demo: the held-out loss should fall by {FALL}")
    if resumed != ended:
        sys.exit("demo: the second run should begin where the first ended")


if __name__ == "__main__":
    main()
