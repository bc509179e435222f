"""Jobs that keep each other from starting, and jobs that only look so."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from flk.__main__ import main
from flk.health import find
from tests.support.api_server import FakeApiServer
from tests.support.jobs import JobBuilder

SHORT = "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu."
CORDONED = "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) were unschedulable."


def half_started(name: str, message: str = SHORT, env: dict[str, int] | None = None) -> JobBuilder:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    job = JobBuilder(replicas=2, name=name)
    job.container["env"] = [{"name": key, "value": str(value)} for key, value in (env or {}).items()]
    return job.pod(0).pod(1, "Pending", {}, node="", conditions=[said])


def others(job: JobBuilder) -> list[dict[str, Any]]:
    """The pods of a job as they are among the pods of all jobs."""
    found = [copy.deepcopy(pod) for pod in job.pods.values()]
    for each in found:
        each["metadata"] |= {"namespace": "team", "labels": {"flk.dev/job": job.name}}
    return found


def codes(job: JobBuilder, *rest: dict[str, Any]) -> list[str]:
    found = [finding.code for finding in find(job.view(other_pods=rest))]
    assert found
    return found


def test_two_jobs_that_hold_a_part_of_their_nodes_are_deadlocked() -> None:
    mine, rival = half_started("gpt"), others(half_started("rival"))
    found = find(mine.view(other_pods=[*others(mine), *rival]))
    assert found[0].code == "Deadlocked"
    assert "1 of its 2 pods hold nodes" in found[0].sentence
    assert "job rival does the same" in found[0].sentence
    assert found[0].remedy.startswith("flk suspend rival -n team")
    for rest in ([], others(mine), rival[:1], rival[1:]):
        assert "Deadlocked" not in codes(mine, *rest)


@pytest.mark.parametrize(("mine", "theirs"), [(CORDONED, SHORT), (SHORT, CORDONED), (CORDONED, CORDONED)])
def test_jobs_that_wait_for_nodes_to_come_back_are_not_deadlocked(mine: str, theirs: str) -> None:
    assert "Deadlocked" not in codes(half_started("gpt", mine), *others(half_started("rival", theirs)))


def test_an_elastic_job_that_trains_is_no_partner_in_a_deadlock() -> None:
    elastic = {"FLK_PODS": 2, "FLK_MIN_PODS": 1}
    assert "Deadlocked" not in codes(half_started("gpt"), *others(half_started("rival", env=elastic)))
    assert "Deadlocked" not in codes(half_started("gpt", env=elastic), *others(half_started("rival")))
    needs_both = {"FLK_PODS": 2, "FLK_MIN_PODS": 2}
    assert "Deadlocked" in codes(half_started("gpt"), *others(half_started("rival", env=needs_both)))
    spare = {"FLK_PODS": 2, "FLK_SPARES": 1}
    assert "Deadlocked" not in codes(half_started("gpt"), *others(half_started("rival", env=spare)))


def test_a_third_job_that_trains_will_make_room() -> None:
    rival = others(half_started("rival"))
    third = others(JobBuilder(replicas=2, name="third").all("pod"))
    assert "Deadlocked" not in codes(half_started("gpt"), *rival, *third)
    for pod in third:
        pod["status"]["phase"] = "Succeeded"
    assert "Deadlocked" in codes(half_started("gpt"), *rival, *third)


def foreign(owner: str = "Job", policy: str = "Never", **requested: str) -> dict[str, Any]:
    """A pod of another tool that runs on a node."""
    meta: dict[str, Any] = {"name": "batch-1", "namespace": "other", "uid": "uid-batch"}
    if owner:
        meta["ownerReferences"] = [{"kind": owner, "name": "batch", "uid": "uid-owner"}]
    container = {"name": "main", "resources": {"requests": requested}}
    spec = {"nodeName": "node-b", "restartPolicy": policy, "containers": [container]}
    return {"metadata": meta, "spec": spec, "status": {"phase": "Running"}}


@pytest.mark.parametrize(
    ("pod", "makes_room"),
    [
        (foreign(cpu="4"), True),
        (foreign("", "Always", cpu="100m"), True),  # which somebody started by hand
        (foreign("RayCluster", "Always", cpu="4"), True),
        (foreign("ReplicaSet", "OnFailure", cpu="4"), True),
        (foreign(memory="1Gi"), False),
        (foreign(cpu="0"), False),
        *((foreign(kind, "Always", cpu="4"), False) for kind in ("ReplicaSet", "DaemonSet", "StatefulSet", "Node")),
        (foreign(cpu="4") | {"status": {"phase": "Succeeded"}}, False),
        (foreign(cpu="4") | {"spec": {"restartPolicy": "Never", "containers": []}}, False),  # without a node
    ],
)
def test_a_pod_of_another_tool_that_may_end_will_make_room(pod: dict[str, Any], makes_room: bool) -> None:
    found = codes(half_started("gpt"), *others(half_started("rival")), pod)
    assert ("Deadlocked" not in found) == makes_room


def test_a_pod_on_a_node_that_takes_no_pods_of_the_job_makes_no_room() -> None:
    around = [*others(half_started("rival")), foreign(cpu="4")]
    taint = {"key": "team", "value": "nlp", "effect": "NoSchedule"}
    for taints, expected in (([], False), ([taint], True)):
        nodes = {"node-b": {"metadata": {"name": "node-b"}, "spec": {"taints": taints}}}
        found = find(half_started("gpt").view(other_pods=around, nodes=nodes))
        assert ("Deadlocked" in [finding.code for finding in found]) == expected


def test_the_pods_of_a_job_that_flk_did_not_make_are_not_those_of_another_tool() -> None:
    mine = half_started("gpt")
    around = [*others(half_started("rival")), *(copy.deepcopy(pod) for pod in mine.pods.values())]
    around[-2]["spec"]["containers"] = foreign(cpu="4")["spec"]["containers"]
    assert "Deadlocked" in codes(mine, *around)


@pytest.mark.usefixtures("kubeconfig")
@pytest.mark.parametrize("readable", [True, False], ids=["all namespaces", "only its namespace"])
def test_pods_of_other_tools_are_read_where_jobs_of_flk_look_deadlocked(
    fake: FakeApiServer, capsys: pytest.CaptureFixture[str], readable: bool
) -> None:
    for name in ("gpt", "rival"):
        job = half_started(name)
        for pod in job.pods.values():
            pod["metadata"]["labels"]["flk.dev/job"] = name
        job.add_to(fake)
    if not readable:
        fake.refused = {"/api/v1/pods": (403, 'pods is forbidden: User "ada" cannot list resource "pods"')}
    main(["why", "gpt"])
    assert capsys.readouterr().out.startswith("Deadlocked: ")
    fake.add("pods", foreign("ReplicaSet", "Always", cpu="4"))
    main(["why", "gpt"])
    assert capsys.readouterr().out.startswith("Deadlocked: ")
    fake.add("pods", foreign(cpu="4"))
    main(["why", "gpt"])
    assert capsys.readouterr().out.startswith("NotEnoughCpu: ")
