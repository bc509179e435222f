"""Measure the time from the command that submits a job to its first optimizer step, in a kind cluster.

    python benchmarks/submit.py [--rounds 8] [--cluster flk] [--replicas 2]

`flk submit` of a script is compared with `kubectl apply` of the manifests that `flk render` makes of the same script,
in the same cluster and a namespace of its own, and an indexed Job, which needs no operator, with a PyTorchJob, both of
`flk submit`. The manifests are rendered before the time begins, and kubectl gets the ConfigMaps before the job, so that
its pods never wait for them. The time ends when the last rank has made its first step, by the clock of the machine,
which the nodes of a kind cluster share. Goals: at most 1.1 times kubectl's time, and a Job at most as long as a
PyTorchJob.

It needs the kind cluster --cluster with the training operator and flk's CPU image in it, see `make image`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import yaml

import measure

GOAL = measure.at_most(1.1)
JOB_GOAL = measure.at_most(1.0)  # of the time of a PyTorchJob
LIMIT = 300  # seconds for one job
MARK = "first step at "
SCRIPT = textwrap.dedent(
    f"""
    import os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        print("{MARK}" + str(time.time()), flush=True)
    dist.destroy_process_group()
    """
)


class Cluster:
    """A namespace of a kind cluster, and the folder with the script and the kubeconfig that leads there."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.folder = folder
        self.namespace = namespace
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLK_", "KUBE"))}
        self.environment = kept | {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}

    def run(self, command: Sequence[str], stdin: str | None = None) -> str:
        """Run a command that must succeed and return its stdout. Raises SystemExit with its stderr otherwise."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, input=stdin, capture_output=True, text=True, timeout=LIMIT
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.run(["kubectl", *arguments], stdin)


@contextmanager
def open_cluster(name: str, image: str) -> Iterator[Cluster]:
    """A new namespace of the kind cluster, deleted at the end. Skips the benchmark where the cluster cannot be used."""
    for program in ("kind", "kubectl"):
        if not shutil.which(program):
            measure.skip(f"{program} is not installed")
    found = subprocess.run(["kind", "get", "kubeconfig", "--name", name], capture_output=True, text=True)
    if found.returncode:
        measure.skip(
            f"there is no kind cluster {name}: kind create cluster --name {name} --config k8s/kind.yaml makes it"
        )
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), f"flk-benchmark-{uuid.uuid4().hex[:6]}")
        (cluster.folder / "kubeconfig").write_text(found.stdout)
        (cluster.folder / "kubeconfig").chmod(0o600)
        (cluster.folder / "train.py").write_text(SCRIPT)
        crd = "pytorchjobs.kubeflow.org"
        if not cluster.kubectl("get", "crd", crd, "--ignore-not-found", "-o", "name"):
            measure.skip(f"the kind cluster {name} has no training operator: k8s/install-operator installs it")
        nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
        if not any(
            image in tag for node in nodes for each in node["status"].get("images", []) for tag in each["names"]
        ):
            measure.skip(f"the kind cluster {name} has no image {image}: make image CLUSTER={name} loads it")
        cluster.kubectl("create", "namespace", cluster.namespace)
        cluster.kubectl("config", "set-context", "--current", "--namespace", cluster.namespace)
        try:
            cluster.kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=60s")
            yield cluster
        finally:
            cluster.kubectl("delete", "namespace", cluster.namespace, "--wait=false")


def seconds_to_first_step(side: str, target: str, cluster: Cluster, options: Sequence[str]) -> float:
    """Seconds from the command to the first step of all ranks. The job is deleted afterwards."""
    name = f"bench-{uuid.uuid4().hex[:6]}"
    flk = [sys.executable, "-m", "flk"]
    job = ["train.py", "--name", name, "--target", target, *options]
    manifests = list(yaml.safe_load_all(cluster.run([*flk, "render", *job])))
    manifests.sort(key=lambda manifest: manifest["kind"])  # ConfigMap, PyTorchJob
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    began = time.time()
    if side == "flk submit":
        cluster.run([*flk, "submit", *job])
    else:
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=listed)  # client-side, an archive is too long
    condition = "Succeeded" if target == "pytorchjob" else "Complete"
    cluster.kubectl("wait", f"--for=condition={condition}", f"{target}/{name}", f"--timeout={LIMIT}s")
    log = cluster.kubectl("logs", "--selector", f"flk.dev/job={name}", "--tail=-1")
    cluster.kubectl("delete", target, name, "--cascade=foreground", f"--timeout={LIMIT}s")
    times = [float(line.partition(MARK)[2]) for line in log.splitlines() if MARK in line]
    if len(times) != 1:
        raise SystemExit(f"job {name} has printed {len(times)} first steps, not one:\n{log}")
    return times[0] - began


def main() -> int:
    parser = measure.parser(__doc__, rounds=8)
    parser.add_argument("--cluster", default="flk", help="name of the kind cluster")
    parser.add_argument("--image", default="flktrain/flk:0.1.0-cpu", help="an image that the cluster has")
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    options = ["--replicas", str(arguments.replicas), "--image", arguments.image, "--cpu", "100m"]
    with open_cluster(arguments.cluster, arguments.image) as cluster:
        report = measure.Report("submit", arguments)
        what = f"time to first step, {arguments.replicas} pods"
        sides = {
            side: partial(seconds_to_first_step, side, "pytorchjob", cluster, options)
            for side in ("flk submit", "kubectl apply")
        }
        report.measure(what, sides, arguments.rounds, GOAL, "s", warmup=1)
        targets = {
            target: partial(seconds_to_first_step, "flk submit", target, cluster, options)
            for target in ("job", "pytorchjob")
        }
        report.measure(what, targets, arguments.rounds, JOB_GOAL, "s", warmup=1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
