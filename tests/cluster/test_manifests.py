"""The API server accepts every job that flk accepts: manifests in a server-side dry run, which creates nothing.

Objects of each target pass the schema of their definition and the webhooks of their controller, which say little of
the pods. So the last pod is tried too, with its Service and its Job, as the controller would create them, in a
namespace that enforces Pod Security `restricted`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flk import labels
from flk.errors import UsageError
from flk.manifest import Bundle
from flk.manifest.render import render
from flk.spec import file as jobfile
from flk.spec.hardware import fabrics
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


# Values at the limits of what is allowed, and beyond them. A value that flk refuses is not tried, but counted.
LABELISH = st.from_regex(r"\A[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z") | st.from_regex(r"\A[A-Za-z0-9._/-]{1,64}\Z")  # noqa: E501  # fmt: skip
NAMES = st.from_regex(r"\A[a-z]([-a-z0-9]{0,52}[a-z0-9])?\Z") | st.from_regex(r"\A[a-z0-9-]{1,60}\Z")
CLAIMS = st.from_regex(r"\A[a-z0-9]{1,5}([.-][a-z0-9]{1,5}){0,3}\Z") | st.from_regex(r"\A[a-z0-9.-]{1,20}\Z") | st.just("a" * 253)  # noqa: E501  # fmt: skip
TEXT = st.text(max_size=20)
PATHS = st.lists(TEXT.filter(bool), min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
VARIABLES = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_.-]{0,20}\Z") | st.sampled_from(["..", ".", "RANK", "PATH", "HOME"])
QUANTITIES = st.from_regex(r"\A[0-9]{1,6}(\.[0-9]{1,3})?(m|k|Ki|M|Mi|G|Gi|T|e3|E2)?\Z")
# fmt: off
CONTAINERS = st.fixed_dictionaries({"name": st.just("pytorch")}, optional={
    "env": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["FLK_STRATEGY", "HOME", "NEW"]), "value": TEXT}), max_size=2),  # noqa: E501
    "securityContext": st.sampled_from([{"readOnlyRootFilesystem": True}, {"capabilities": {"drop": ["ALL", "KILL"]}}]),
    "volumeMounts": st.just([{"name": "more", "mountPath": "/more"}]),
    "imagePullPolicy": st.sampled_from(["Always", "Never", None]),
    "terminationMessagePolicy": st.none(),
})
PATCHES = st.fixed_dictionaries({}, optional={
    "metadata": st.fixed_dictionaries({}, optional={
        "annotations": st.dictionaries(st.from_regex(r"\A[a-z]{1,9}(/[a-z]{1,9})?\Z"), TEXT | st.none(), max_size=2),
        "labels": st.dictionaries(st.sampled_from(["team", "flk.dev/job"]), st.sampled_from(["a", "", None]), max_size=2),  # noqa: E501
    }),
    "spec": st.fixed_dictionaries({"volumes": st.just([{"name": "more", "emptyDir": {}}])}, optional={
        "terminationGracePeriodSeconds": st.integers(0, 2**31 - 1) | st.none(),
        "hostname": st.from_regex(r"\A[a-z]([-a-z0-9]{0,20}[a-z0-9])?\Z"),
        "securityContext": st.fixed_dictionaries({}, optional={"runAsUser": st.integers(1, 2**31 - 1), "fsGroup": st.none()}),  # noqa: E501
        "tolerations": st.just([{"operator": "Exists"}]),
        "containers": st.tuples(CONTAINERS).map(list),
    }),
})
# fmt: on
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "target": st.sampled_from(list(TARGETS)),
    "image": st.from_regex(r"\A[a-zA-Z0-9.:/@_-]{1,30}\Z")
    | st.from_regex(r"\A[a-z]{1,9}(/[a-z0-9]{1,9})?(:[a-z0-9]{1,9})?\Z"),
    "command": st.lists(TEXT, max_size=3).map(lambda words: ["train.py", *words]),
    "replicas": st.integers(1, 100_000),
    "processes": st.integers(1, 1024),
    "fabric": st.sampled_from(list(fabrics())),
    "restarts": st.integers(0, 100_000),
    "disruptions": st.integers(0, 100_000),
    "deadline": st.integers(1, 2**31 - 1) | st.from_regex(r"\A[0-9]{1,3}[dhms]\Z"),
    "queue": LABELISH,
    "ship": st.just(False),
    "env": st.dictionaries(VARIABLES, TEXT, min_size=1, max_size=2),
    "secrets": st.dictionaries(VARIABLES, st.tuples(CLAIMS, LABELISH).map(":".join), min_size=1, max_size=2),
    "volumes": st.lists(st.tuples(CLAIMS, PATHS).map(":".join), min_size=1, max_size=2),
    "checkpoint": st.tuples(CLAIMS, PATHS).map(":".join),
    "save_every": st.integers(1, 2**31 - 1),
    "resources": st.fixed_dictionaries(
        {}, optional={"cpu": QUANTITIES, "memory": QUANTITIES, "shm": QUANTITIES, "gpu": st.integers(0, 16)}
    ),
    "patch": PATCHES,
    "nodes": st.fixed_dictionaries(
        {},
        optional={
            "selector": st.dictionaries(LABELISH, LABELISH | st.just(""), max_size=2),
            "tolerations": st.lists(
                st.tuples(LABELISH, st.sampled_from(["", ":NoSchedule", ":NoExecute", "=v:NoExecute", "="])).map(
                    "".join
                )
                | st.fixed_dictionaries(
                    {},
                    optional={
                        "key": LABELISH,
                        "operator": st.sampled_from(["Exists", "Equal"]),
                        "value": LABELISH,
                        "effect": st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"]),
                        "tolerationSeconds": st.integers(-5, 2**31 - 1),
                    },
                ),
                max_size=2,
            ),
        },
    ),
}  # fmt: skip
BATCH = 10  # jobs in one call of the API server, which takes longer than they do


def job_of(name: str, fields: dict[str, Any], accepted: Counter[str], refused: Counter[str]) -> Job | None:
    """The job with the fields that flk accepts, or None if it refuses the name. Counts what it accepts and refuses."""
    data: dict[str, Any] = {"name": name, "command": ["train.py"]}
    job = None
    for field, value in {"name": name, **fields}.items():
        try:
            job = validated(data | {field: value})
            render(job, Bundle())  # refuses patches that do not fit
        except UsageError:
            refused[field] += 1
            if job is None:
                return None
            job = validated(data)
        else:
            accepted[field] += 1
            data |= {field: value}
    return job


@pytest.mark.soak
def test_what_flk_accepts_the_api_server_accepts(accepted: Callable[..., None]) -> None:
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()

    @given(jobs=st.lists(st.tuples(NAMES, st.fixed_dictionaries({}, optional=FIELDS)), min_size=BATCH, max_size=BATCH))
    @settings(max_examples=10)
    def try_jobs(jobs: list[tuple[str, dict[str, Any]]]) -> None:
        made = [job for name, fields in jobs if (job := job_of(name, fields, taken, refused)) is not None]
        if made:
            accepted(*made)

    try_jobs()
    # The generated values must reach the API server, and some must lie beyond the limits.
    assert not [field for field in ("name", *FIELDS) if not taken[field]], (taken, refused)
    assert {"name", "image", "queue", "env", "secrets", "volumes", "nodes"} <= refused.keys(), (taken, refused)
