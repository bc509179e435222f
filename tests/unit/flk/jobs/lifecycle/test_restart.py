"""A restart on other nodes: which affinity the pods get, and by which requests."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from flk.jobs.lifecycle.restart import avoiding
from flk.manifest import Bundle, render
from flk.spec.job import Job
from flk.targets import TARGETS
from tests.support.api_server import JOBS
from tests.support.commands import Run
from tests.support.jobs import JobBuilder

NOT_ON = {"key": "metadata.name", "operator": "NotIn"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def affinity(job: dict[str, Any]) -> dict[str, Any]:
    (spec,) = TARGETS[next(name for name, t in TARGETS.items() if t.kind == job["kind"])].pod_specs(job)
    return spec.get("affinity") or {}


def of_nodes(*nodes: str) -> dict[str, Any]:
    terms = [{"matchFields": [{**NOT_ON, "values": [node]} for node in nodes]}]
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}


@pytest.mark.parametrize("target", TARGETS)
def test_pods_of_every_target_avoid_nodes(target: str) -> None:
    (job, *_) = render(Job(name="gpt", target=target, image="i", command=["train.py"]), Bundle())
    before = copy.deepcopy(job)
    placed = avoiding(job, ["node-a", "node-b"])
    assert affinity(placed) == of_nodes("node-a", "node-b")
    assert job == before
    assert affinity(avoiding(placed, ["node-a"])) == of_nodes("node-a", "node-b")
    assert avoiding(job, []) == job


def test_affinity_of_the_job_stays() -> None:
    terms = [{"matchExpressions": [{"key": key, "operator": "Exists"}]} for key in ("gpu", "accelerator")]
    own = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}, "preferred": [1]}, "podAffinity": {"a": 1}}
    job = JobBuilder().job
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"] = own
    found = affinity(avoiding(job, ["node-a"]))
    avoided = [{**NOT_ON, "values": ["node-a"]}]
    assert found["podAffinity"] == {"a": 1}
    assert found["nodeAffinity"]["preferred"] == [1]
    assert found["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [{**t, "matchFields": avoided} for t in terms]


def test_a_job_that_runs_is_created_again_on_other_nodes(fake: Any, run: Run) -> None:
    JobBuilder().add_to(fake)
    before = fake.objects[JOBS]["gpt"]["metadata"]["uid"]
    code, _, stderr = run("restart", "gpt", "--avoid-node", "node-x")
    assert code == 0, stderr
    after = fake.objects[JOBS]["gpt"]
    assert (affinity(after), after["metadata"]["uid"] != before) == (of_nodes("node-x"), True)


def test_a_trainjob_that_flk_has_not_made_cannot_be_given_other_nodes(fake: Any, run: Run) -> None:
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
    fake.objects[path] = {}
    spec = {"suspend": True, "runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": 2}}
    fake.add("trainjobs", {"metadata": {"name": "gpt", "namespace": "team"}, "spec": spec})
    code, _, stderr = run("restart", "gpt", "--avoid-node", "node-x")
    assert (code, {request.method for request in fake.requests}) == (2, {"GET"})
    assert "error: the pods of this TrainJob cannot be given other nodes: flk has not made it\n" in stderr


@pytest.mark.parametrize("name", ["node_a", "-x", ""])
def test_a_name_that_no_node_has_is_refused(fake: Any, run: Run, name: str) -> None:
    JobBuilder().add_to(fake)
    code, _, stderr = run("restart", "gpt", f"--avoid-node={name}")
    assert code == 2
    assert "--avoid-node: " in stderr
    assert fake.asked("PATCH") == []
