"""Compare what `flk plan` predicts with published runs, and measure what planning a large model takes.

    python benchmarks/plan.py [--rounds 6]

The runs are those that torchtitan publishes for Llama 3.1 8B: FSDP2 in bf16, sequences of 8,192 tokens, two in a
micro-batch, selective recomputation, on H100s with 96 GB (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). No
constant of the planner is fitted to them. What is compared is the deviation: the larger of prediction and publication
over the smaller. Goals: at most 1.1 for memory, 1.2 for tokens per second. Planning a model of 70 billion parameters on
1,024 GPUs has to take at most 5 seconds and 500 MB.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import measure

TOKENS = 2 * 8192  # of a rank in a step
# GPUs, tokens per second and GPU, GiB of memory.
PUBLISHED = ((8, 5762, 82.4), (128, 5605, 67.0))
SECONDS, MEGABYTES = 5.0, 500.0


def plan(size: str, gpus: int, batch: int) -> tuple[dict[str, float], float, float]:
    """Plan Llama on nodes of 8 GPUs. Returns the row of full_shard, the wall time in s and the peak memory in MB."""
    script = Path(__file__).with_name("llama.py")
    command = [sys.executable, "-m", "flk", "plan", str(script), "--replicas", str(gpus // 8), "--gpu", "8"]
    command += ["--gpu-type", "h100-96gb", "--fabric", "infiniband", "-o", "json", "--"]
    began = time.monotonic()
    process = subprocess.run(
        [*command, "--size", size, "--batch", str(batch)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds = time.monotonic() - began
    megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    rows = json.loads(process.stdout)["rows"]
    row = next(row for row in rows if row["strategy"] == "full_shard" and not row["recompute"])
    return row, seconds, megabytes


def main() -> int:
    arguments = measure.parser(__doc__, rounds=6).parse_args()
    report = measure.Report("plan", arguments)
    rounds = arguments.rounds
    large = [plan("70b", 1024, 1)[1:] for _ in range(rounds)]
    for number, (what, unit, limit) in enumerate((("wall time", "s", SECONDS), ("peak memory", "MB", MEGABYTES))):
        found = [each[number] for each in large]
        report.compare(
            f"{what} of flk plan, 70B on 1,024 GPUs / limit", found, [limit] * rounds, measure.at_most(1), unit
        )
    for gpus, tokens, gibibytes in PUBLISHED:
        row = plan("8b", gpus, 2)[0]
        compared = (
            ("memory", row["total"] / 2**30, gibibytes, "GiB", 1.1),
            ("tokens per second", TOKENS / row["step_seconds"], tokens, "tokens/s", 1.2),
        )
        for what, predicted, published, unit, limit in compared:
            measure.progress(f"{gpus} GPUs, {what}: predicted {predicted:.4g}, published {published:.4g} {unit}")
            # A prediction is the same in every round.
            larger, smaller = max(predicted, published), min(predicted, published)
            name = f"deviation of {what}, 8B on {gpus} GPUs"
            report.compare(name, [larger] * rounds, [smaller] * rounds, measure.at_most(limit), unit)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
