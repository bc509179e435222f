"""Measure flk's commands for a job of 1,000 pods and for 500 jobs against kubectl's, in a cluster with kwok's nodes.

    python benchmarks/large_jobs.py [--rounds 8] [--cluster flk] [--pods 1000] [--jobs 500]

`list`, `status` and `why` are compared with `kubectl get -o json` of the same objects, plus the time that flk itself
takes to start (`flk --version`). Goal: at most 1.5 times kubectl's time plus that start. The first output of `status`
is measured while the pods of the large job start; its goal is 1 s. It needs nodes that kwok plays, labelled type=kwok,
with room for all pods, which run nothing. Without them, the benchmark is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import measure

GOAL = measure.at_most(1)
KUBECTL_SHARE = 1.5  # of kubectl's time that flk may take, beside its own start
FIRST_OUTPUT = 1.0  # seconds
LIMIT = 1800.0  # seconds for the pods to start
TOLERATIONS = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]


def job(name: str, pods: int) -> dict[str, Any]:
    """A PyTorchJob whose pods run on kwok's nodes."""
    container = {"name": "pytorch", "image": "none", "resources": {"requests": {"cpu": "10m"}}}
    spec = {"containers": [container], "nodeSelector": {"type": "kwok"}, "tolerations": TOLERATIONS}
    worker = {"replicas": pods, "restartPolicy": "Never", "template": {"spec": spec}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"runPolicy": {"cleanPodPolicy": "None"}, "pytorchReplicaSpecs": {"Worker": worker}},
    }


class Namespace:
    """A namespace of the cluster in which all jobs of one measurement are."""

    def __init__(self, context: str, jobs: Sequence[dict[str, Any]]) -> None:
        """Create the namespace and the jobs."""
        self.name = f"bench-{uuid.uuid4().hex[:6]}"
        self._context = ["--context", context]
        self._pods = sum(int(each["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]) for each in jobs)
        self.run(self.kubectl("create", "namespace", self.name))
        items = {"apiVersion": "v1", "kind": "List", "items": list(jobs)}
        self.run(self.kubectl("create", "-f", "-"), stdin=json.dumps(items))

    def kubectl(self, *words: str) -> list[str]:
        """A command line of kubectl."""
        return ["kubectl", *self._context, "-n", self.name, *words]

    def flk(self, *words: str) -> list[str]:
        """A command line of flk."""
        return [sys.executable, "-m", "flk", *words, "-n", self.name, *self._context]

    def run(self, command: Sequence[str], stdin: str | None = None) -> float:
        """Run a command to its end, and return the seconds that it took."""
        start = time.perf_counter()
        subprocess.run(command, input=stdin, text=True, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start

    def running(self) -> int:
        """Number of pods that run."""
        words = self.kubectl("get", "pods", "--field-selector=status.phase=Running", "-o", "name")
        return len(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())

    def await_pods(self, share: float) -> None:
        """Wait until this share of the pods run."""
        until = time.monotonic() + LIMIT
        while (count := self.running()) < share * self._pods:
            if time.monotonic() > until:
                raise SystemExit(f"only {count} of {self._pods} pods run after {LIMIT:.0f} s")
            time.sleep(2)

    def delete(self) -> None:
        """Delete the namespace, without waiting for it."""
        self.run(self.kubectl("delete", "namespace", self.name, "--wait=false"))


def first_output(command: Sequence[str]) -> float:
    """Seconds from the start of a command to its first line."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return time.perf_counter() - start


def compare(report: measure.Report, space: Namespace, names: Mapping[str, Sequence[str]], rounds: int) -> None:
    """Compare commands of flk (by what they are called) with kubectl, for the same objects."""
    for what, words in names.items():
        theirs = space.kubectl("get", "pytorchjobs,pods", "-o", "json")
        cases = {"flk": space.flk(*words), "kubectl": theirs, "start": [sys.executable, "-m", "flk", "--version"]}
        found = measure.alternate(
            {name: partial(space.run, line) for name, line in cases.items()},
            rounds,
            warmup=1,
            show=lambda seconds: f"{seconds:.2f} s",
        )
        allowed = [KUBECTL_SHARE * k + s for k, s in zip(found["kubectl"], found["start"], strict=True)]
        report.compare(f"{what} / {KUBECTL_SHARE:g} kubectl get -o json + start", found["flk"], allowed, GOAL, "s")


def main() -> int:
    parser = measure.parser(__doc__, rounds=8)
    parser.add_argument("--cluster", default=os.environ.get("FLK_TEST_KIND", "flk"), help="name of the kind cluster")
    parser.add_argument("--pods", type=int, default=1000, help="pods of the large job")
    parser.add_argument("--jobs", type=int, default=500, help="jobs of one pod")
    arguments = parser.parse_args()
    context = f"kind-{arguments.cluster}"
    nodes = subprocess.run(
        ["kubectl", "--context", context, "get", "nodes", "-l", "type=kwok", "-o", "name"],
        capture_output=True,
        text=True,
    )
    if not nodes.stdout:
        measure.skip(f"the cluster of context {context} has no nodes that kwok plays (label type=kwok)")
    report = measure.Report("large_jobs", arguments)
    large = Namespace(context, [job("large", arguments.pods)])
    try:
        large.await_pods(0.1)
        times = [first_output(large.flk("status", "large")) for _ in range(arguments.rounds)]
        what = f"first output of status while {arguments.pods:,} pods start / limit"
        report.compare(what, times, [FIRST_OUTPUT] * len(times), GOAL, "s")
        large.await_pods(0.95)
        commands = {f"flk {verb}, {arguments.pods:,} pods": [verb, "large"] for verb in ("status", "why")}
        compare(report, large, commands, arguments.rounds)
    finally:
        large.delete()
    many = Namespace(context, [job(f"small-{number}", 1) for number in range(arguments.jobs)])
    try:
        many.await_pods(0.95)
        compare(report, many, {f"flk list, {arguments.jobs} jobs": ["list"]}, arguments.rounds)
    finally:
        many.delete()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
