"""Measure checkpoints in the memory of pods: the time to restore from them, and the cost of a save in every step.

    python benchmarks/memory.py [--rounds 6] [--gigabytes 1.0]

Two launchers run on this machine, as two pods would, and hold copies of each other's parts. First, four ranks train a
model under DDP and save once, and then one of them is killed. The time from the kill until all ranks have the state
again is compared with the time of the same job with a folder in place of the memory; the folder's files are in the page
cache, which is the best case of a volume. Goal: at most the folder's time. Second, the GPT example on two ranks saves
in every step, with the default model and with a larger one. Its steps per second are compared with a run without
checkpoints. Goal: at least 0.9.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import launch
import measure
from example import EXAMPLE, WARM_UP, rate, step_times
from flk_runtime.contract import pod_env, user_env
from recovery import end, until

# Parameters of the example's model: its arguments, and the steps of a run.
MODELS = {"116 thousand": ([], 150), "3 million": (["--layers", "4", "--width", "256"], 50)}
RANKS, WIDTH = 4, 2048
COPIED = 3.0  # seconds after which the launchers have copied the parts
# The second attempt writes when each rank has its state. The step gives the optimizer its state.
SCRIPT = textwrap.dedent(
    f"""
    import os, pathlib, sys, time
    import torch
    import flk_runtime as flk

    with flk.init(log_every=0, save_every=0) as run:
        layers = max(1, round(float(sys.argv[1]) * 1e9 / 12 / {WIDTH}**2))
        model = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range(layers)))
        model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
        if run.attempt:
            assert run.steps == 1
            run.barrier()
            pathlib.Path(f"restored.{{run.rank}}").write_text(f"{{time.time()}}\\n")
        else:
            model(torch.ones(1, {WIDTH})).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            run.save(wait=True)
            run.barrier()
            pathlib.Path(f"saved.{{run.rank}}").write_text(f"{{os.getpid()}}\\n")
            while True:
                run.barrier()
                time.sleep(0.05)
    """
)


def in_memory(folder: Path) -> dict[str, str]:
    """The variables of a job that keeps its checkpoints in memory only."""
    return {pod_env.MEMORY_ROOT: str(folder)}


def in_folder(folder: Path) -> dict[str, str]:
    """The variables of a job that keeps its checkpoints in a folder only."""
    return {user_env.MEMORY_LIMIT: "0", user_env.CHECKPOINT: str(folder)}


def start(script: list[str], ranks: int, variables: Mapping[str, str], folder: Path) -> list[subprocess.Popen[str]]:
    """Start the ranks under two launchers; the first one's output can be read."""
    processes = launch.flk(script, ranks, 2, 1)
    outputs = (subprocess.PIPE, subprocess.DEVNULL)
    return [
        launch.Process(process.command, {**process.variables, **variables}).start(
            folder, stdout=output, stderr=subprocess.DEVNULL, text=True
        )
        for process, output in zip(processes, outputs, strict=True)
    ]


def seconds_to_restore(gigabytes: float, *, memory: bool) -> float:
    """Seconds from the kill of a rank until all ranks have the state that was saved."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        variables = in_memory(Path(shared)) if memory else in_folder(folder / "checkpoint")
        jobs = start(["train.py", str(gigabytes)], RANKS, variables, folder)
        try:
            first = until(lambda: lines(folder, "saved"))
            time.sleep(COPIED)
            killed = time.time()
            os.kill(int(first[-1]), signal.SIGKILL)
            restored = until(lambda: lines(folder, "restored"))
            codes = [job.wait(60) for job in jobs]
            if any(codes):
                raise SystemExit(f"flk ended with {codes}")
            return max(restored) - killed
        finally:
            end(jobs, folder)


def lines(folder: Path, kind: str) -> list[float] | None:
    """The lines of all ranks, or None until each rank has written its line."""
    texts = [file.read_text() for file in folder.glob(f"{kind}.*")]
    whole = [float(text) for text in texts if text.endswith("\n")]
    return whole if len(whole) == RANKS else None


def steps_per_second(model: str, *, save: bool) -> float:
    """Run the example once, and save in every step or never. Returns its rate after step WARM_UP."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        variables: dict[str, str] = {user_env.MEMORY_LIMIT: "0"}
        if save:
            variables = {**in_memory(Path(shared)), user_env.SAVE_EVERY: "1"}
        options, steps = MODELS[model]
        jobs = start([str(EXAMPLE), "--steps", str(steps), *options], 2, variables, Path(name))
        try:
            times = step_times(line for line in jobs[0].stdout or () if line.startswith("[rank 0]"))
            codes = [job.wait(60) for job in jobs]
        finally:
            end(jobs, Path(name))
    if any(codes) or WARM_UP not in times:
        raise SystemExit(f"the example ended with {codes} after steps {sorted(times)}")
    return rate(times)


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    arguments = parser.parse_args()
    report = measure.Report("memory", arguments)
    restore = partial(seconds_to_restore, arguments.gigabytes)
    times = measure.alternate(
        {"memory": partial(restore, memory=True), "folder": partial(restore, memory=False)},
        arguments.rounds,
        show="{:.2f} s".format,
    )
    what = f"killed rank to restored state of {arguments.gigabytes:g} GB, {RANKS} ranks, from memory / from a folder"
    report.compare(what, times["memory"], times["folder"], measure.at_most(1), "s")
    for model in MODELS:
        rates = measure.alternate(
            {
                "save": partial(steps_per_second, model, save=True),
                "never": partial(steps_per_second, model, save=False),
            },
            arguments.rounds,
            show="{:.1f} steps/s".format,
        )
        what = f"rate of the example, {model} parameters, 2 ranks, saved in memory in every step / never"
        report.compare(what, rates["save"], rates["never"], measure.at_least(0.9), "steps/s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
