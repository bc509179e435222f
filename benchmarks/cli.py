"""Measure how long flk's commands take as whole processes, against kubectl's.

    python benchmarks/cli.py [--rounds 20] [--flk PATH]

Commands that need no cluster are compared with `kubectl version --client`; `status`, `list` and `wait` of a finished
job with `kubectl get pytorchjobs`, all on the same fake API server. Both the wall time and the CPU time (user and
system, of the process and its children) are compared. Goals: `flk --version` takes at most half of kubectl's time, the
commands that ask a server at most 2 or 3 times kubectl's; see GOALS. The names of jobs must be
completed within 300 ms: a shell waits for them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import measure

sys.path.append(str(Path(__file__).parents[1]))  # for tests.support
from tests.support.api_server import FakeApiServer, write_kubeconfig

VERSION = "kubectl version --client"
GET = "kubectl get pytorchjobs"
JOB = "bench"
REPLICAS = 4
MADE, ENDED = "2026-01-01T00:00:00Z", "2026-01-01T00:10:00Z"
GOALS = {  # each command of flk, the one of kubectl that it is compared with, and the goal
    "flk --version": (VERSION, measure.at_most(0.5)),
    "flk --help": (VERSION, measure.at_most(2)),
    f"flk render, {REPLICAS} replicas": (VERSION, measure.at_most(2.5)),
    "flk render, 1000 replicas": (VERSION, measure.at_most(5)),
    "flk status": (GET, measure.at_most(2)),
    "flk list": (GET, measure.at_most(2)),
    "flk wait": (GET, measure.at_most(3)),
    "completion of job names": (GET, measure.at_most(3)),
}
LIMITS = {"completion of job names": 300.0}  # milliseconds, whatever kubectl takes


def commands(flk: str) -> dict[str, list[str]]:
    """The command lines to measure, by the names of GOALS."""
    render = [flk, "render", "train.py", "--name", JOB, "--replicas"]
    return {
        VERSION: VERSION.split(),
        "flk --version": [flk, "--version"],
        "flk --help": [flk, "--help"],
        f"flk render, {REPLICAS} replicas": [*render, str(REPLICAS)],
        "flk render, 1000 replicas": [*render, "1000"],
        GET: GET.split(),
        "flk status": [flk, "status", JOB],
        "flk list": [flk, "list"],
        "flk wait": [flk, "wait", JOB],
        "completion of job names": [
            "env",
            "_FLK_COMPLETE=complete_bash",
            "COMP_WORDS=flk status ",
            "COMP_CWORD=2",
            flk,
        ],
    }


@dataclass(frozen=True)
class Times:
    """Wall and CPU time of one process, in milliseconds."""

    wall: float
    cpu: float


def run(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> Times:
    """Run a command to its end. Raises CalledProcessError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Times(1000 * wall, 1000 * cpu)


@contextlib.contextmanager
def finished_job(flk: str, folder: str) -> Iterator[dict[str, str]]:
    """A fake API server that holds one job, which has succeeded. Gives the variables that lead commands to it."""
    server = FakeApiServer()
    server.documents.update(discovery())
    server.objects["/apis/batch/v1/namespaces/team/jobs"] = {}  # each cluster serves them, and flk lists them too
    render = [flk, "render", "train.py", "--name", JOB, "--replicas", str(REPLICAS)]
    manifests = subprocess.run(render, cwd=folder, check=True, capture_output=True, text=True).stdout
    job = next(manifest for manifest in yaml.safe_load_all(manifests) if manifest["kind"] == "PyTorchJob")
    job["metadata"]["namespace"] = "team"
    condition = {"type": "Succeeded", "status": "True", "lastTransitionTime": ENDED, "reason": "", "message": ""}
    job["status"] = {"conditions": [condition], "startTime": MADE, "completionTime": ENDED}
    uid = server.add("pytorchjobs", job)["metadata"]["uid"]
    for index in range(REPLICAS):
        server.add("pods", ended_pod(index, uid))
    path = write_kubeconfig(Path(folder, "kubeconfig"), server.url)
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    # An installed flk has its bytecode. Compiling the sources in each command takes as long as all else in it.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    kept["PYTHONPYCACHEPREFIX"] = str(Path(folder, "bytecode"))
    try:
        yield kept | {"KUBECONFIG": str(path), "HOME": folder}  # kubectl keeps the API discovery in HOME
    finally:
        server.close()


def ended_pod(index: int, job_uid: str) -> dict[str, Any]:
    """A worker pod that has succeeded."""
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": JOB, "uid": job_uid, "controller": True}
    labels = {"job-name": JOB, "replica-index": str(index), "replica-type": "worker"}
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": MADE, "finishedAt": ENDED}
    status = {"name": "pytorch", "restartCount": 0, "state": {"terminated": ended}}
    return {
        "metadata": {
            "name": f"{JOB}-worker-{index}",
            "labels": {f"training.kubeflow.org/{name}": value for name, value in labels.items()},
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": "node", "containers": [{"name": "pytorch", "image": "image"}]},
        "status": {"phase": "Succeeded", "containerStatuses": [status]},
    }


def discovery() -> dict[str, dict[str, Any]]:
    """The aggregated discovery of a server that serves PyTorchJobs, as Kubernetes answers since 1.30.

    kubectl asks for it once, and keeps it in files; so does flk.
    """

    def served(group: str, version: str, plural: str, kind: str) -> dict[str, Any]:
        resource = {
            "resource": plural,
            "responseKind": {"group": group, "version": version, "kind": kind},
            "scope": "Namespaced",
            "singularResource": kind.lower(),
            "verbs": ["get", "list", "watch"],
        }
        return {"metadata": {"name": group}, "versions": [{"version": version, "resources": [resource]}]}

    form = {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}}
    groups = [
        served("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"),
        served("batch", "v1", "jobs", "Job"),
    ]
    return {"/api": form | {"items": [served("", "v1", "pods", "Pod")]}, "/apis": form | {"items": groups}}


def main() -> int:
    parser = measure.parser(__doc__, rounds=20)
    parser.add_argument("--flk", default=str(Path(sys.executable).parent / "flk"), help="the flk to measure")
    arguments = parser.parse_args()
    report = measure.Report("cli", arguments)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text("print('hello')\n")
        with finished_job(arguments.flk, folder) as environment:
            lines = commands(arguments.flk)
            for name, (peer, goal) in GOALS.items():
                times = measure.alternate(
                    {each: partial(run, lines[each], folder, environment) for each in (name, peer)},
                    arguments.rounds,
                    warmup=1,  # fills the caches
                    show=lambda times: f"{times.wall:.0f} ms",
                )
                ours, theirs = times[name], times[peer]
                what = f"{name} / {peer}"
                report.compare(what, [t.wall for t in ours], [t.wall for t in theirs], goal, "ms")
                if name in LIMITS:
                    limit = LIMITS[name]
                    walls = [t.wall for t in ours]
                    report.compare(f"{name} / {limit:.0f} ms", walls, [limit] * len(walls), measure.at_most(1), "ms")
                report.compare(f"{what}, CPU time", [t.cpu for t in ours], [t.cpu for t in theirs], goal, "ms")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
