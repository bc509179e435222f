"""Measure flk's commands in a namespace with 500 jobs: their time, their memory and their requests, in a kind cluster.

    python benchmarks/many_jobs.py [--rounds 8] [--cluster flk] [--jobs 500]

The jobs are suspended, so that they have no pods: what is measured is how the commands grow with the number of jobs.
`list`, and `status` of one job and of all, are compared with `kubectl get pytorchjobs -o json`. Goals: at most
1.5 times kubectl's time plus the time in which flk itself starts, at most 200 MB, and at most 20 requests, however many
jobs there are. It needs the kind cluster --cluster with the training operator; without it, the benchmark is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import measure

GOAL = measure.at_most(1)
KUBECTL_SHARE = 1.5  # of kubectl's time that flk may take, beside its own start
MEMORY = 200.0  # MB at most
REQUESTS = 20.0  # at most
LABEL = "team=bench"
# Runs flk, and says at the end how many requests it has sent.
COUNTED = """
import sys, urllib3
from flk.__main__ import main
plain, sent = urllib3.PoolManager.request, []
urllib3.PoolManager.request = lambda *words, **named: sent.append(words) or plain(*words, **named)
code = main(sys.argv[1:])
print(len(sent), file=sys.stderr)
sys.exit(code)
"""


class Use(NamedTuple):
    """What a command has taken: seconds, and the most memory of its process in MB."""

    seconds: float
    memory: float


def job(name: str) -> dict[str, Any]:
    """A suspended PyTorchJob."""
    container = {"name": "pytorch", "image": "none", "resources": {"requests": {"cpu": "10m"}}}
    worker = {"replicas": 4, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": dict([LABEL.split("=")])},
        "spec": {"runPolicy": {"suspend": True}, "pytorchReplicaSpecs": {"Worker": worker}},
    }


def use(command: Sequence[str]) -> Use:
    """Run a command to its end, which must be a good one, and return what it has taken."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Use(time.perf_counter() - start, used.ru_maxrss / 1000)


def requests(command: Sequence[str]) -> int:
    """Number of requests that a command of flk sends."""
    counted = [command[0], "-c", COUNTED, *command[3:]]
    done = subprocess.run(counted, capture_output=True, text=True, check=True)
    return int(done.stderr.split()[-1])


def main() -> int:
    parser = measure.parser(__doc__, rounds=8)
    parser.add_argument("--cluster", default=os.environ.get("FLK_TEST_KIND", "flk"), help="name of the kind cluster")
    parser.add_argument("--jobs", type=int, default=500, help="suspended jobs in the namespace")
    arguments = parser.parse_args()
    kubectl = ["kubectl", "--context", f"kind-{arguments.cluster}"]
    crd = [*kubectl, "get", "crd", "pytorchjobs.kubeflow.org", "-o", "name"]
    if subprocess.run(crd, capture_output=True).returncode:
        measure.skip(f"there is no kind cluster {arguments.cluster} with the training operator")
    report = measure.Report("many_jobs", arguments)
    namespace = f"bench-{uuid.uuid4().hex[:6]}"
    subprocess.run([*kubectl, "create", "namespace", namespace], check=True, stdout=subprocess.DEVNULL)
    try:
        items = {"apiVersion": "v1", "kind": "List", "items": [job(f"job-{n}") for n in range(arguments.jobs)]}
        create = [*kubectl, "-n", namespace, "create", "-f", "-"]
        subprocess.run(create, input=json.dumps(items), text=True, check=True, stdout=subprocess.DEVNULL)
        suffix = ["-n", namespace, "--context", f"kind-{arguments.cluster}"]
        words = {
            "list": ["list"],
            "status of one": ["status", "job-0"],
            "status": ["status", "-l", LABEL],
        }
        for what, verb in words.items():
            line = [sys.executable, "-m", "flk", *verb, *suffix]
            cases = {
                "flk": line,
                "kubectl": [*kubectl, "-n", namespace, "get", "pytorchjobs", "-o", "json"],
                "start": [sys.executable, "-m", "flk", "--version"],
            }
            found = measure.alternate(
                {name: partial(use, command) for name, command in cases.items()},
                arguments.rounds,
                warmup=1,
                show=lambda used: f"{used.seconds:.2f} s, {used.memory:.0f} MB",
            )
            pairs = zip(found["kubectl"], found["start"], strict=True)
            allowed = [KUBECTL_SHARE * theirs.seconds + start.seconds for theirs, start in pairs]
            named, rounds = f"flk {what}, {arguments.jobs} jobs", arguments.rounds
            times, memory = [used.seconds for used in found["flk"]], [used.memory for used in found["flk"]]
            report.compare(f"{named} / {KUBECTL_SHARE:g} kubectl get -o json + start", times, allowed, GOAL, "s")
            report.compare(f"memory of {named} / limit", memory, [MEMORY] * rounds, GOAL, "MB")
            sent = [float(requests(line)) for _ in range(min(rounds, 6))]
            report.compare(f"requests of {named} / limit", sent, [REQUESTS] * len(sent), GOAL, "requests")
    finally:
        subprocess.run([*kubectl, "delete", "namespace", namespace, "--wait=false"], stdout=subprocess.DEVNULL)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
