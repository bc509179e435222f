"""The API server accepts every job that flk accepts: manifests in a server-side dry run, which creates nothing.

Objects of each target pass the schema of their definition and the webhooks of their controller, which say little of
the pods. So the last pod is tried too, with its Service and its Job, as the controller would create them, in a
namespace that enforces Pod Security `restricted`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.errors import UsageError
from flk.manifest import Bundle
from flk.manifest.render import render
from flk.spec import file as jobfile
from flk.spec import labels
from flk.spec.job import Job, validated
from flk.targets import TARGETS, target_of
from flk.targets.indexed import COMPLETION_INDEX, IndexedTarget
from flk.targets.model import WORKER

RUNTIME = Path(__file__).parents[2] / "k8s" / "training-runtime.yaml"
GOLDEN = Path(__file__).parents[1] / "unit" / "flk" / "manifest" / "golden"
JOBS = sorted(GOLDEN.glob("*.job.yaml"))
SMALL = Bundle(runtime=b"runtime", code=b"code")


def objects(job: Job, bundle: Bundle) -> list[dict[str, Any]]:
    """The manifests of a job, and what its controller creates: the Job in between, the last pod and a Service."""
    manifests = render(job, Bundle() if job.ship is False else bundle, submission="s", owner="u@h")
    target = target_of(manifests[0])
    (role,) = target.replicas(manifests[0]).values()
    name = target.pod_name(str(job.name), WORKER, job.replicas - 1)
    spec = {**role.template["spec"], "restartPolicy": "Never"}
    (container,) = [c for c in spec["containers"] if c["name"] == target.container]
    if isinstance(target, IndexedTarget):
        service, parent = str(job.name), name.rpartition("-")[0]
        own = {COMPLETION_INDEX: str(job.replicas - 1), "batch.kubernetes.io/job-name": parent}
        spec |= {"hostname": name, "subdomain": service} | {k: spec[k] for k in ("hostname", "subdomain") if k in spec}
        name += "-x7k2p"
    else:
        service, parent = name, ""
        own = {"training.kubeflow.org/job-name": str(job.name), labels.REPLICA_INDEX: str(job.replicas - 1)}
        own |= {"training.kubeflow.org/operator-name": "pytorchjob-controller"}
    metadata = {"name": name, "annotations": role.template["metadata"].get("annotations")}
    made = [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}]
    made[0]["metadata"]["labels"] = role.template["metadata"]["labels"] | own
    if target.name != "job":  # which has a Service among its manifests, and is a Job itself
        ports = [{"name": port["name"], "port": port["containerPort"]} for port in container["ports"]]
        headless = {"clusterIP": "None", "selector": own, "ports": ports}
        made.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": service}, "spec": headless})
    return [*manifests, *made, *jobs_between(job, manifests[0], parent, role.template)]


def jobs_between(job: Job, manifest: dict[str, Any], name: str, template: dict[str, Any]) -> list[dict[str, Any]]:
    """The indexed Job that JobSet's controller creates of a JobSet, or of the JobSet that Trainer creates."""
    if manifest["kind"] not in ("JobSet", "TrainJob"):
        return []
    holder = manifest if manifest["kind"] == "JobSet" else yaml.safe_load(RUNTIME.read_text())["spec"]["template"]
    spec = dict(holder["spec"]["replicatedJobs"][0]["template"]["spec"])
    size = {"completions": job.replicas, "parallelism": job.replicas}
    spec |= size | {"template": {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}}
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}]


@pytest.fixture
def accepted(trainer: None, kubectl: Any) -> Callable[..., None]:
    """Fails unless the API server takes all objects of these jobs."""

    def accepted(*jobs: Job, bundle: Bundle = SMALL) -> None:
        items = [item for job in jobs for item in objects(job, bundle)]
        kubectl("create", "--dry-run=server", "-o", "name", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))  # noqa: E501  # fmt: skip

    return accepted


@pytest.mark.promise("Clusters: The API server accepts what flk accepts, for every target")
@pytest.mark.parametrize("target", TARGETS)
def test_the_api_server_accepts(accepted: Callable[..., None], target: str) -> None:
    jobs, refused = [], []
    for path in JOBS:
        job = validated(jobfile.read(str(path)) | {"target": target})
        try:
            render(job, Bundle())
        except UsageError:
            refused.append(job.name)
        else:
            jobs.append(job)
    assert refused == (["full", "patched"] if target == "trainjob" else [])
    accepted(*jobs)


def test_a_manifest_that_is_wrong_is_refused(accepted: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: a name that is one character too long for a service."""
    job = validated({"command": "train.py", "name": "a" * 54})
    accepted(job)
    with pytest.raises(AssertionError, match="must be no more than 63"):
        accepted(job.model_copy(update={"name": "a" * 55}))
