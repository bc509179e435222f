"""What our validation accepts, the API server accepts: manifests as a server-side dry run, nothing is created.

The PyTorchJob goes through its CRD's schema and the operator's webhook. Those say little about the pod inside, so the
last pod and its service, as the operator would make them, are tried too: in a namespace that enforces Pod Security
`restricted`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flk import labels
from flk.errors import UsageError
from flk.manifest import Bundle
from flk.manifest.render import render
from flk.spec import file as jobfile
from flk.spec.fabric import fabrics
from flk.spec.job import Job, validated

GOLDEN = Path(__file__).parents[1] / "unit" / "golden"
JOBS = sorted(GOLDEN.glob("*.job.yaml"))
SMALL = Bundle(runtime=b"runtime", code=b"code")
LARGE = Bundle(runtime=b"runtime", code=b"code" * 500_000)


def objects(job: Job, bundle: Bundle) -> list[dict[str, Any]]:
    """The manifests of a job, and its last pod with its service as the operator makes them."""
    manifests = render(job, Bundle() if job.ship is False else bundle, submission="s", owner="u@h")
    template = manifests[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    name = f"{job.name}-worker-{job.replicas - 1}"
    own = {
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/job-name": job.name,
        "training.kubeflow.org/replica-type": "worker",
        labels.REPLICA_INDEX: str(job.replicas - 1),
    }
    metadata = {**template["metadata"], "name": name, "labels": {**template["metadata"]["labels"], **own}}
    ports = template["spec"]["containers"][0]["ports"]
    return [
        *manifests,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {**template["spec"], "restartPolicy": "Never"},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "clusterIP": "None",
                "selector": labels,
                "ports": [{"name": port["name"], "port": port["containerPort"]} for port in ports],
            },
        },
    ]


@pytest.fixture
def accepted(kubectl: Any) -> Callable[..., None]:
    """Fails unless the API server takes all objects of these jobs."""

    def accepted(*jobs: Job, bundle: Bundle = SMALL) -> None:
        items = [item for job in jobs for item in objects(job, bundle)]
        kubectl("create", "--dry-run=server", "-o", "name", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))  # noqa: E501  # fmt: skip

    return accepted


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name.removesuffix(".job.yaml"))
def test_the_api_server_accepts(accepted: Callable[..., None], path: Path) -> None:
    accepted(validated(jobfile.read(str(path))))


def test_the_api_server_accepts_code_in_several_config_maps(accepted: Callable[..., None]) -> None:
    accepted(validated({"command": "train.py", "name": "large"}), bundle=LARGE)


def test_a_manifest_that_is_wrong_is_refused(accepted: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: a name that is one character too long for a service."""
    job = validated({"command": "train.py", "name": "a" * 54})
    accepted(job)
    with pytest.raises(AssertionError, match="must be no more than 63"):
        accepted(job.model_copy(update={"name": "a" * 55}))


# Values near the edges of what is allowed, and beyond: what validation refuses is not tried.
LABELISH = st.from_regex(r"\A[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z") | st.from_regex(r"\A[A-Za-z0-9._/-]{1,64}\Z")  # noqa: E501  # fmt: skip
NAMES = st.from_regex(r"\A[a-z]([-a-z0-9]{0,52}[a-z0-9])?\Z") | st.from_regex(r"\A[a-z0-9-]{1,60}\Z")
CLAIMS = st.from_regex(r"\A[a-z0-9]{1,5}([.-][a-z0-9]{1,5}){0,3}\Z") | st.from_regex(r"\A[a-z0-9.-]{1,20}\Z") | st.just("a" * 253)  # noqa: E501  # fmt: skip
TEXT = st.text(max_size=20)
PATHS = st.lists(TEXT.filter(bool), min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
VARIABLES = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_.-]{0,20}\Z") | st.sampled_from(["..", ".", "RANK", "PATH", "HOME"])
QUANTITIES = st.from_regex(r"\A[0-9]{1,6}(\.[0-9]{1,3})?(m|k|Ki|M|Mi|G|Gi|T|e3|E2)?\Z")
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "image": st.from_regex(r"\A[a-zA-Z0-9.:/@_-]{1,30}\Z"),
    "command": st.lists(TEXT, max_size=3).map(lambda words: ["train.py", *words]),
    "replicas": st.integers(1, 150_000),
    "processes": st.integers(1, 1024),
    "fabric": st.sampled_from(list(fabrics())),
    "restarts": st.integers(0, 100_000),
    "deadline": st.integers(1, 2**31 - 1) | st.from_regex(r"\A[0-9]{1,3}[dhms]\Z"),
    "queue": LABELISH,
    "ship": st.just(False),
    "env": st.dictionaries(VARIABLES, TEXT, min_size=1, max_size=2),
    "secrets": st.dictionaries(VARIABLES, st.tuples(CLAIMS, LABELISH).map(":".join), min_size=1, max_size=2),
    "volumes": st.lists(st.tuples(CLAIMS, PATHS).map(":".join), min_size=1, max_size=2),
    "checkpoint": st.tuples(CLAIMS, PATHS).map(":".join),
    "save_every": st.integers(1, 2**31 - 1),
    "resources": st.fixed_dictionaries({}, optional={"cpu": QUANTITIES, "memory": QUANTITIES, "shm": QUANTITIES, "gpu": st.integers(0, 16)}),  # noqa: E501
    "nodes": st.fixed_dictionaries({}, optional={
        "selector": st.dictionaries(LABELISH, LABELISH | st.just(""), max_size=2),
        "tolerations": st.lists(
            st.tuples(LABELISH, st.sampled_from(["", ":NoSchedule", ":NoExecute", "=v:NoExecute", "="])).map("".join)
            | st.fixed_dictionaries({}, optional={
                "key": LABELISH, "operator": st.sampled_from(["Exists", "Equal"]), "value": LABELISH,
                "effect": st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"]),
                "tolerationSeconds": st.integers(-5, 2**31 - 1),
            }),
            max_size=2,
        ),
    }),
}  # fmt: skip
BATCH = 5  # jobs in one call of the API server, which takes longer than they do


def job_of(name: str, fields: dict[str, Any]) -> Job | None:
    """The job if our validation accepts it; where it does not, the job without the fields that it refuses."""
    data: dict[str, Any] = {"name": name, "command": ["train.py"]}
    try:
        job = validated(data)
    except UsageError:
        return None
    for field, value in fields.items():
        try:
            job = validated(data | {field: value})
        except UsageError:
            continue
        data |= {field: value}
    return job


@given(jobs=st.lists(st.tuples(NAMES, st.fixed_dictionaries({}, optional=FIELDS)), min_size=BATCH, max_size=BATCH))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_we_accept_the_api_server_accepts(
    accepted: Callable[..., None], jobs: list[tuple[str, dict[str, Any]]]
) -> None:
    made = [job for name, fields in jobs if (job := job_of(name, fields)) is not None]
    if made:
        accepted(*made)
