"""Nodes that the pods of an existing job avoid from now on: which affinity they get, and by which requests."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from flk.jobs.lifecycle.placement import avoiding
from flk.manifest import Bundle, render
from flk.spec.job import Job
from flk.targets import TARGETS
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import JobRecord, QuarantinedNode
from tests.support.api_server import JOBS
from tests.support.commands import Run
from tests.support.jobs import NOW, JobBuilder

NOT_ON = {"key": "metadata.name", "operator": "NotIn"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
LOST = Failure(Kind.LOST, 1, pod_name="gpt-worker-1", node="node-b")


def affinity(job: dict[str, Any]) -> dict[str, Any]:
    (spec,) = TARGETS[next(name for name, t in TARGETS.items() if t.kind == job["kind"])].pod_specs(job)
    return spec.get("affinity") or {}


def of_nodes(required: list[str], preferred: list[str]) -> dict[str, Any]:
    terms = [{"matchFields": [{**NOT_ON, "values": [node]} for node in required]}]
    wanted = [{"weight": 100, "preference": {"matchFields": [{**NOT_ON, "values": [node]}]}} for node in preferred]
    return {
        "nodeAffinity": ({REQUIRED: {"nodeSelectorTerms": terms}} if required else {})
        | ({PREFERRED: wanted} if preferred else {})
    }


@pytest.mark.parametrize("target", TARGETS)
def test_pods_of_every_target_avoid_nodes_by_a_rule_and_a_quarantine_by_a_wish(target: str) -> None:
    (job, *_) = render(Job(name="gpt", target=target, image="i", command=["train.py"]), Bundle())
    before = copy.deepcopy(job)
    placed = avoiding(job, ["node-a", "node-b"], ["node-c"])
    assert affinity(placed) == of_nodes(["node-a", "node-b"], ["node-c"])
    assert job == before
    assert affinity(avoiding(placed, ["node-a"], [])) == of_nodes(["node-a", "node-b"], [])  # the quarantine is over
    assert avoiding(job, [], []) == job


def test_affinity_of_the_job_stays() -> None:
    terms = [{"matchExpressions": [{"key": key, "operator": "Exists"}]} for key in ("gpu", "accelerator")]
    wish = {"weight": 7, "preference": {"matchExpressions": [{"key": "fast", "operator": "Exists"}]}}
    own = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}, PREFERRED: [wish]}, "podAffinity": {"a": 1}}
    job = JobBuilder().job
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"] = own
    found = affinity(avoiding(job, ["node-a"], ["node-b"]))
    avoided = [{**NOT_ON, "values": ["node-a"]}]
    assert found["podAffinity"] == {"a": 1}
    assert found["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [{**t, "matchFields": avoided} for t in terms]
    assert found["nodeAffinity"][PREFERRED][0] == wish
    assert affinity(avoiding(job, [], [])) == own


@pytest.mark.parametrize("command", ["restart", "resume"])
@pytest.mark.parametrize(("until", "avoided"), [(0.0, True), (4e9, True), (NOW, False)])
def test_nodes_in_quarantine_are_avoided_until_they_are_forgotten(
    fake: Any, run: Run, command: str, until: float, avoided: bool
) -> None:
    record = JobRecord("preempted", 143, failure=LOST, quarantine=[QuarantinedNode("node-b", "it broke", until)])
    builder = JobBuilder().ended(0, 143, record.to_json())
    builder.job["spec"]["runPolicy"]["suspend"] = True
    builder.add_to(fake)
    fake.documents["/api/v1/nodes/node-x"] = {"metadata": {"name": "node-x"}}
    code, _, stderr = run(command, "gpt", "--avoid-node", "node-x")
    assert code == 0, stderr
    assert "there is no node" not in stderr
    assert affinity(fake.objects[JOBS]["gpt"]) == of_nodes(["node-x"], ["node-b"] * avoided)
    assert ("node node-b is in quarantine, and avoided where others have room: it broke" in stderr) is avoided


@pytest.mark.parametrize(("status", "told"), [(404, True), (403, False)])
@pytest.mark.parametrize("command", ["resume", "restart"])
def test_a_node_to_avoid_that_does_not_exist_is_named(
    fake: Any, run: Run, command: str, status: int, told: bool
) -> None:
    builder = JobBuilder()
    builder.job["spec"]["runPolicy"]["suspend"] = True
    builder.add_to(fake)
    fake.refused["/api/v1/nodes/node-x"] = (status, "no")
    code, _, stderr = run(command, "gpt", "--avoid-node", "node-x")
    assert (code, "there is no node node-x in the cluster now" in stderr) == (0, told)
    assert affinity(fake.objects[JOBS]["gpt"]) == of_nodes(["node-x"], [])


def test_restart_of_a_pytorchjob_that_runs_changes_it_while_it_is_suspended(fake: Any, run: Run) -> None:
    JobBuilder().add_to(fake)
    assert run("restart", "gpt", "--avoid-node", "node-x")[0] == 0
    bodies = [json.dumps(request.body) for request in fake.requests if request.method == "PATCH"]
    assert [("affinity" in body, '"suspend": true' in body) for body in bodies] == [
        (False, True),
        (True, False),
        (False, False),
    ]
    assert affinity(fake.objects[JOBS]["gpt"]) == of_nodes(["node-x"], [])


def test_resume_gives_pods_of_a_pytorchjob_other_nodes_also_while_it_runs(fake: Any, run: Run) -> None:
    JobBuilder().add_to(fake)
    code, _, stderr = run("resume", "gpt", "--avoid-node", "node-x", "--avoid-node", "node-y")
    assert (code, affinity(fake.objects[JOBS]["gpt"])) == (0, of_nodes(["node-x", "node-y"], []))
    assert "was not suspended; its pods avoid the node when they are made anew" in stderr


@pytest.mark.parametrize("command", ["restart", "resume"])
def test_a_trainjob_that_flk_has_not_made_cannot_be_given_other_nodes(fake: Any, run: Run, command: str) -> None:
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
    fake.objects[path] = {}
    spec = {"suspend": True, "runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": 2}}
    fake.add("trainjobs", {"metadata": {"name": "gpt", "namespace": "team"}, "spec": spec})
    code, _, stderr = run(command, "gpt", "--avoid-node", "node-x")
    assert (code, {request.method for request in fake.requests}) == (2, {"GET"})
    assert "error: the pods of a TrainJob cannot be given other nodes while it exists\n" in stderr
    assert ("flk restart" in stderr) is (command == "resume"), "restart does not tell to restart"


@pytest.mark.parametrize("name", ["node_a", "-x", ""])
def test_a_name_that_no_node_has_is_refused(fake: Any, run: Run, name: str) -> None:
    JobBuilder().add_to(fake)
    for command in ("restart", "resume"):
        code, _, stderr = run(command, "gpt", f"--avoid-node={name}")
        assert code == 2
        assert "--avoid-node: " in stderr
    assert fake.asked("PATCH") == []
