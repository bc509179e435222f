"""The target of a job that leaves it to the cluster, by what the cluster serves and by what the job needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flk.errors import UsageError
from flk.jobs.submission import prepare
from flk.observe.client import JobClient
from flk.spec.job import validated
from tests.support.api_server import BATCH, JOBS, MAPS, FakeApiServer

TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
RUNTIMES = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
KUEUE_CONFIG = "/api/v1/namespaces/kueue-system/configmaps/kueue-manager-config"
ALL = (JOBS, TRAINJOBS, JOBSETS, BATCH)

Kind = Callable[..., str]


@pytest.fixture
def kind(fake: FakeApiServer, kubeconfig: Any, tmp_path: Path) -> Kind:
    """What a job becomes in a cluster that serves some kinds."""
    (tmp_path / "train.py").touch()

    def kind(*served: str, runtime: bool = True, **fields: Any) -> str:
        for path in ALL:
            fake.objects.pop(path, None)
        fake.objects |= {path: {} for path in served}
        if runtime:
            fake.objects[RUNTIMES] = {"flk": {"metadata": {"name": "flk"}}}
        job = validated({"command": "train.py", "replicas": 2, **fields})
        return str(prepare(job, tmp_path, JobClient.connect("fake")).manifests[0]["kind"])

    return kind


@pytest.mark.promise("Clusters: A job that names no target runs in any cluster, also in one without an operator")
@pytest.mark.parametrize("target", [{}, {"target": "auto"}])
@pytest.mark.parametrize(
    ("served", "expected"),
    [(ALL, "PyTorchJob"), (ALL[1:], "TrainJob"), (ALL[2:], "JobSet"), ((BATCH,), "Job"), ((JOBS,), "PyTorchJob")],
)
def test_the_first_kind_that_the_cluster_serves(
    kind: Kind, served: tuple[str, ...], expected: str, target: dict[str, str]
) -> None:
    assert kind(*served, **target) == expected


def test_a_trainjob_needs_the_runtime_of_flk(kind: Kind) -> None:
    assert kind(TRAINJOBS, BATCH, runtime=False) == "Job"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"elastic": "1:2"}, "Job"),  # whose number of pods `flk scale` can change
        ({"elastic": "1:2", "queue": "team"}, "JobSet"),  # the queue decides about pods
        ({"spares": 1}, "JobSet"),
        ({"name": "a" * 50}, "Job"),  # the names of pods of the others are longer
    ],
)
def test_a_kind_that_cannot_express_the_job_is_passed_over(kind: Kind, fields: dict[str, Any], expected: str) -> None:
    assert kind(*ALL[1:], **fields) == expected
    with pytest.raises(UsageError):
        kind(*ALL[1:], target="trainjob", **fields)


def test_a_mistake_that_no_target_can_express_is_told_as_it_is(kind: Kind) -> None:
    with pytest.raises(UsageError, match="patch"):
        kind(*ALL, patch={"spec": {"containers": None}})


def test_the_site_and_the_job_fix_the_target(kind: Kind, fake: FakeApiServer) -> None:
    labels = {"flk.dev/defaults": "true"}
    fake.objects[MAPS]["d"] = {"metadata": {"name": "d", "labels": labels}, "data": {"defaults.yaml": "target: jobset"}}
    assert kind(*ALL) == "JobSet"
    assert kind(*ALL, target="job") == "Job"


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("integrations: {frameworks: [batch/job, jobset.x-k8s.io/jobset]}", "JobSet"),
        ("integrations: {frameworks: [batch/job, kubeflow.org/pytorchjob]}", "PyTorchJob"),
        ("integrations: {frameworks: [ray.io/rayjob]}", "Job"),
        ("integrations: {}", "PyTorchJob"),
        ("[", "PyTorchJob"),
        (None, "PyTorchJob"),
    ],
)
def test_a_queue_takes_a_kind_that_kueue_manages(
    kind: Kind, fake: FakeApiServer, listed: str | None, expected: str
) -> None:
    if listed:
        fake.documents[KUEUE_CONFIG] = {"data": {"controller_manager_config.yaml": listed}}
    assert kind(*ALL, queue="team") == expected
    assert kind(*ALL) == "PyTorchJob"


def test_a_configuration_of_kueue_that_may_not_be_read_changes_nothing(kind: Kind, fake: FakeApiServer) -> None:
    fake.refused[KUEUE_CONFIG] = (403, "forbidden", {})
    assert kind(*ALL, queue="team") == "PyTorchJob"
