"""Measure the time from the deletion of a pod to the next step that all ranks have finished, in a kind cluster.

    python benchmarks/pod_recovery.py [--rounds 6] [--cluster flk] [--replicas 2]

It is compared with the start of the same job: the time from the end of `flk submit`, when the pods may be created, to
the first step of all ranks. Once the last pod is deleted, and once pod 0, which serves the rendezvous. Goal: at most
2.5 times the start: the old pod has to end first. It needs the same cluster and image as
submit.py.
"""

from __future__ import annotations

import sys
import textwrap
import time
import uuid
from collections.abc import Sequence
from functools import partial

import measure
from submit import Cluster, open_cluster

GOAL = measure.at_most(2.5)
LIMIT = 300.0  # seconds for a step
MARK = "first step of attempt "
# Rank 0 prints when all ranks have made the first step of an attempt. The job is deleted at the end.
SCRIPT = textwrap.dedent(
    f"""
    import os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1_000_000):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        if step == 0:
            dist.barrier()
            if dist.get_rank() == 0:
                print("{MARK}" + os.environ["TORCHELASTIC_RESTART_COUNT"], time.time(), flush=True)
        time.sleep(0.01)
    """
)


def start_and_recovery(victim: int, cluster: Cluster, options: Sequence[str]) -> tuple[float, float]:
    """Seconds of the start of a job, and of its recovery from the deletion of the pod with the index ``victim``."""
    (cluster.folder / "train.py").write_text(SCRIPT)
    name = f"bench-{uuid.uuid4().hex[:6]}"
    cluster.run([sys.executable, "-m", "flk", "submit", "train.py", "--name", name, *options])
    began = time.time()
    try:
        started = first_step(cluster, name, attempt=0)
        deleted = time.time()
        cluster.kubectl("delete", "pod", f"{name}-worker-{victim}", "--wait=false")
        return started - began, first_step(cluster, name, attempt=1) - deleted
    finally:
        cluster.kubectl("delete", "pytorchjob", name, "--cascade=foreground", f"--timeout={LIMIT:.0f}s")


def first_step(cluster: Cluster, name: str, attempt: int) -> float:
    """When all ranks had made the first step of an attempt, by time.time. Waits for it."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        pod = f"pod/{name}-worker-0"
        phase = cluster.kubectl("get", pod, "--ignore-not-found", "-o", "jsonpath={.status.phase}")
        log = cluster.kubectl("logs", pod, "--ignore-errors") if phase == "Running" else ""
        for line in log.splitlines():
            number, _, at = line.partition(MARK)[2].partition(" ")
            if number == str(attempt):
                return float(at)
        time.sleep(0.2)
    raise SystemExit(f"job {name} has not made a step of attempt {attempt} in {LIMIT:.0f} s")


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--cluster", default="flk", help="name of the kind cluster")
    parser.add_argument("--image", default="flktrain/flk:0.1.0-cpu", help="an image that the cluster has")
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    options = ["--replicas", str(arguments.replicas), "--image", arguments.image, "--cpu", "100m"]
    victims = {"the last pod": arguments.replicas - 1, "pod 0": 0}
    with open_cluster(arguments.cluster, arguments.image) as cluster:
        report = measure.Report("pod_recovery", arguments)
        times = measure.alternate(
            {name: partial(start_and_recovery, index, cluster, options) for name, index in victims.items()},
            arguments.rounds,
            show=lambda found: f"{found[1]:.2f} s after a start of {found[0]:.2f} s",
        )
    for name, found in times.items():
        starts, recoveries = zip(*found, strict=True)
        report.compare(f"recovery from the deletion of {name} / start of the job", recoveries, starts, GOAL, "s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
