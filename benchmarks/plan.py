"""Compare predictions of `flk plan` with published runs, and measure time and memory of planning a large model.

    python benchmarks/plan.py [--rounds 6]

The runs are torchtitan's published runs of Llama 3 with FSDP2 in bf16, sequences of 8,192 tokens, not compiled. By two
of them constants of the planner may be chosen: 8B on H100s with 96 GB (torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md). Three others only judge: 8B and 70B on 64 A100s (torchtitan,
docs/performance.md of 2024). No constant has been chosen by any of them. What is compared is the deviation: the larger
of prediction and publication over the smaller. Goals: at most 1.1 for memory, 1.2 for tokens per second. Planning a
model of 70 billion parameters on 1,024 GPUs has to take at most 5 seconds and 500 MB.

After that, `flk bench` measures the five strategies on this machine with three small models, on two pods of two ranks
with gloo. Of the five, at least four must be in the same order by their measured time of a step and by the time that
the plan predicts. Times that differ by less than 5 % count as equal.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import measure

LENGTH = 8192  # tokens of a sequence


class Published(NamedTuple):
    """A published run: tokens per second and GPU, and GiB of memory, if that was published."""

    size: str
    gpus: int
    kind: str
    batch: int
    recompute: str
    tokens: float
    memory: float | None


CHOOSING = (
    Published("8b", 8, "h100-96gb", 2, "operations", 5762, 82.4),
    Published("8b", 128, "h100-96gb", 2, "operations", 5605, 67.0),
)
JUDGING = (
    Published("8b", 64, "a100", 1, "layers", 2904, None),
    Published("8b", 64, "a100", 1, "operations", 2973, None),
    Published("70b", 64, "a100", 1, "all", 331, None),
)
SECONDS, MEGABYTES = 5.0, 500.0
SMALL = ("wide", "deep", "pixels")
IN_ORDER, EQUAL = 4, 1.05


def plan(
    size: str, gpus: int, batch: int, kind: str = "h100-96gb", recompute: str = "operations"
) -> tuple[dict[str, float], float, float]:
    """Plan Llama on nodes of 8 GPUs. Returns the row of full_shard, the wall time in s and the peak memory in MB."""
    script = Path(__file__).with_name("llama.py")
    command = [sys.executable, "-m", "flk", "plan", str(script), "--replicas", str(gpus // 8), "--gpu", "8"]
    command += ["--gpu-type", kind, "--fabric", "infiniband", "-o", "json", "--"]
    began = time.monotonic()
    process = subprocess.run(
        [*command, "--size", size, "--batch", str(batch), "--recompute", recompute],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds = time.monotonic() - began
    megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    rows = json.loads(process.stdout)["rows"]
    row = next(row for row in rows if row["strategy"] == "full_shard")
    return row, seconds, megabytes


def bench(model: str, steps: int) -> dict[str, tuple[float, float]]:
    """Measured and predicted seconds of a step on four ranks of this machine, by strategy."""
    script = Path(__file__).with_name("small_models.py")
    command = [sys.executable, "-m", "flk", "bench", str(script), "--local", "--replicas", "2", "--processes", "2"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [*command, "--steps", str(steps), "-o", "json", "--", model],
            env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": folder},
            stdout=subprocess.PIPE,
            check=True,
        )
    result, predicted = json.loads(process.stdout), on_cpus(script, model)
    return {name: (each["seconds"], predicted[name]) for name, each in result["strategies"].items()}


def on_cpus(script: Path, model: str) -> dict[str, float]:
    """Predicted seconds of a step on two pods of two ranks of this machine, by strategy, with the script as it is."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        request = {"nodes": 2, "ranks": 2, "device": "cpu", "memory": 1 << 40, "fabric": "auto", "output": str(file)}
        command = [sys.executable, "-m", "flk_plan", json.dumps(request), str(script), model]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=True)
        rows = json.loads(file.read_text())["rows"]
    return {row["strategy"]: row["step_seconds"] for row in rows}


def longest_order(times: Sequence[tuple[float, float]]) -> int:
    """The size of the largest subset of (measured, predicted) that both put in the same order, up to equal times."""

    def agree(one: tuple[float, float], other: tuple[float, float]) -> bool:
        ratios = [second / first for first, second in zip(one, other, strict=True)]
        equal = any(1 / EQUAL < ratio < EQUAL for ratio in ratios)
        return equal or (ratios[0] > 1) == (ratios[1] > 1)

    for size in range(len(times), 1, -1):
        for chosen in itertools.combinations(times, size):
            if all(agree(*pair) for pair in itertools.combinations(chosen, 2)):
                return size
    return min(1, len(times))


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each strategy (default 20)")
    parser.add_argument("--only-order", action="store_true", help="only compare the order of the strategies")
    arguments = parser.parse_args()
    report = measure.Report("plan", arguments)
    if not arguments.only_order:
        compare_published(report, arguments.rounds)
    for model in SMALL:
        found = []
        for _ in range(arguments.rounds):
            times = bench(model, arguments.steps)
            found.append(float(longest_order(list(times.values()))))
            shown = ", ".join(f"{name} {mine * 1e3:.3g} / {other * 1e3:.3g}" for name, (mine, other) in times.items())
            measure.progress(f"{model}: {found[-1]:g} in order; measured / predicted ms: {shown}")
        what = f"strategies in the predicted order, {model} / all"
        report.compare(what, found, [5.0] * arguments.rounds, measure.at_least(IN_ORDER / 5), "strategies")
    return report.finish()


def compare_published(report: measure.Report, rounds: int) -> None:
    """Compare predictions with published runs, and the time and memory of planning with their limits."""
    large = [plan("70b", 1024, 1)[1:] for _ in range(rounds)]
    for number, (what, unit, limit) in enumerate((("wall time", "s", SECONDS), ("peak memory", "MB", MEGABYTES))):
        found = [each[number] for each in large]
        report.compare(
            f"{what} of flk plan, 70B on 1,024 GPUs / limit", found, [limit] * rounds, measure.at_most(1), unit
        )
    for run in (*CHOOSING, *JUDGING):
        row = plan(run.size, run.gpus, run.batch, run.kind, run.recompute)[0]
        compared = (
            ("memory", row["total"] / 2**30, run.memory, "GiB", 1.1),
            ("tokens per second", run.batch * LENGTH / row["step_seconds"], run.tokens, "tokens/s", 1.2),
        )
        use = "may choose" if run in CHOOSING else "judges"
        title = f"{run.size.upper()} on {run.gpus} {run.kind.upper()}, recomputes {run.recompute}, {use}"
        for what, predicted, published, unit, limit in compared:
            if published is None:
                continue
            measure.progress(f"{title}, {what}: predicted {predicted:.4g}, published {published:.4g} {unit}")
            name = f"deviation of {what}, {title}, predicted / published"
            report.compute(name, predicted, published, measure.within_factor(limit), unit)


if __name__ == "__main__":
    sys.exit(main())
