"""Measure for how long training stops when a job changes its size, and when a spare takes a lost pod's place, on kind.

    python benchmarks/elastic.py [--rounds 6] [--cluster flk]

The time begins at the last step before the change and ends when all ranks have finished the first step after it, by
the clock of pod 0. An elastic job changes between 4 and 3 pods by `flk scale`; the time in which a new pod starts does
not count, since the others train meanwhile. In a job of 2 pods with a spare, the pod beside pod 0 is killed. Both keep
checkpoints in memory. Goals: at most 5 s for a change of size, and at most 1 s for the spare. It needs the same cluster
and image as submit.py.
"""

from __future__ import annotations

import sys
import textwrap
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import measure
from submit import Cluster, open_cluster

CHANGE, SPARE = 5.0, 1.0  # seconds
GOAL = measure.at_most(1)
LIMIT = 300.0  # seconds for an attempt
SETTLE = 8.0  # seconds in which the launcher of a pod that runs joins as a spare
MARK = "stopped before attempt "
# Rank 0 writes the time of each step into a file of pod 0, and prints after the first step how long ago the last was.
SCRIPT = textwrap.dedent(
    f"""
    import pathlib, socket, time
    import torch, torch.distributed as dist
    import flk_runtime as flk

    last = pathlib.Path("/tmp/last-step")
    with flk.init(log_every=0, save_every=10) as run:
        model = torch.nn.Linear(64, 64)
        model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
        pods = [None] * run.world_size
        dist.all_gather_object(pods, socket.gethostname())
        before = float(last.read_text()) if run.rank == 0 and last.exists() else time.time()
        first = True
        for _ in range(1_000_000):
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if first:
                dist.barrier()
            if run.rank == 0:
                now = time.time()
                last.write_text(str(now))
                if first:
                    print("{MARK}" + f"{{run.attempt}} {{now - before}} {{','.join(pods)}}", flush=True)
            first = False
            run.step()
            time.sleep(0.01)
    """
)


@dataclass(frozen=True)
class Stop:
    """How long training stopped before an attempt, and the pods of that attempt, by their ranks."""

    attempt: int
    seconds: float
    pods: list[str]


class Training:
    """A job that runs SCRIPT in one pod per rank."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self.name = cluster, name

    def next_stop(self, after: int, pods: int) -> Stop:
        """Wait for the first attempt of so many pods after attempt number ``after``. Returns the stop before it."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            pod = f"pod/{self.name}-worker-0"
            phase = self._cluster.kubectl("get", pod, "--ignore-not-found", "-o", "jsonpath={.status.phase}")
            log = self._cluster.kubectl("logs", pod, "--ignore-errors") if phase == "Running" else ""
            for line in log.splitlines():
                number, seconds, names = ([*line.partition(MARK)[2].split(), "", "", ""])[:3]
                if number and int(number) > after and len(names.split(",")) == pods:
                    return Stop(int(number), float(seconds), names.split(","))
            time.sleep(0.5)
        raise SystemExit(f"job {self.name} has not trained with {pods} pods after attempt {after} in {LIMIT:.0f} s")


@contextmanager
def training(cluster: Cluster, options: Sequence[str]) -> Iterator[Training]:
    """A job, deleted at the end."""
    (cluster.folder / "train.py").write_text(SCRIPT)
    name = f"bench-{uuid.uuid4().hex[:6]}"
    cluster.run([sys.executable, "-m", "flk", "submit", "train.py", "--name", name, *options])
    try:
        yield Training(cluster, name)
    finally:
        cluster.kubectl("delete", "pytorchjob", name, "--cascade=foreground", f"--timeout={LIMIT:.0f}s")


def change_size(cluster: Cluster, options: Sequence[str], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of the changes from 4 to 3 pods, and of the changes back."""
    down, up = [], []
    with training(cluster, ["--elastic", "3:4", *options]) as job:
        stop = job.next_stop(-1, 4)
        for number in range(rounds):
            cluster.run([sys.executable, "-m", "flk", "scale", job.name, "3"])
            stop = job.next_stop(stop.attempt, 3)
            down.append(stop.seconds)
            cluster.run([sys.executable, "-m", "flk", "scale", job.name, "4"])
            stop = job.next_stop(stop.attempt, 4)
            up.append(stop.seconds)
            measure.progress(f"round {number + 1} of {rounds}: 4 to 3 pods {down[-1]:.2f} s, 3 to 4 {up[-1]:.2f} s")
    return down, up


def use_spare(cluster: Cluster, options: Sequence[str], rounds: int) -> list[float]:
    """Seconds in which a spare takes the place of a pod that is killed."""
    found = []
    with training(cluster, ["--replicas", "2", "--spares", "1", *options]) as job:
        stop = job.next_stop(-1, 2)
        for number in range(rounds):
            cluster.kubectl("wait", "--for=condition=Ready", "pods", "--all", f"--timeout={LIMIT:.0f}s")
            time.sleep(SETTLE)
            cluster.kubectl("delete", "pod", stop.pods[1], "--grace-period=0", "--force")
            stop = job.next_stop(stop.attempt, 2)
            found.append(stop.seconds)
            measure.progress(f"round {number + 1} of {rounds}: {stop.pods[1]} in {found[-1]:.2f} s")
    return found


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--cluster", default="flk", help="name of the kind cluster")
    parser.add_argument("--image", default="flktrain/flk:0.1.0-cpu", help="an image that the cluster has")
    arguments = parser.parse_args()
    options = ["--image", arguments.image, "--cpu", "100m"]
    with open_cluster(arguments.cluster, arguments.image) as cluster:
        report = measure.Report("elastic", arguments)
        down, up = change_size(cluster, options, arguments.rounds)
        spare = use_spare(cluster, options, arguments.rounds)
    for what, times, limit in (("4 to 3 pods", down, CHANGE), ("3 to 4 pods", up, CHANGE), ("a spare", spare, SPARE)):
        report.compare(f"stop of training, {what} / limit", times, [limit] * len(times), GOAL, "s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
