"""The PodGroups of gangs, against the types of Kubernetes' own gang scheduling in each version that flk knows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flk.errors import MissingApiError
from flk.health import find
from flk.jobs.choice import with_gang
from flk.manifest import make_bundle, render
from flk.observe.client import JobClient
from flk.observe.resources import POD_GROUPS
from flk.spec.job import Job, validated
from flk.targets import TARGETS
from flk.targets.gang import GANGS
from tests.support.api_server import FakeApiServer
from tests.support.jobs import JobBuilder

RECORDED = json.loads((Path(__file__).parents[3] / "support" / "pod_groups.json").read_text())["versions"]


def job(**fields: Any) -> Job:
    return validated({"command": "train.py", "name": "gpt", "replicas": 3, "ship": False, "target": "job", **fields})


def rendered(job: Job) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The object of a job, and its PodGroups."""
    found = render(job, make_bundle(job, Path()), namespace="team")
    return found[0], [item for item in found if item["kind"] == "PodGroup"]


def test_every_version_that_flk_knows_is_recorded() -> None:
    assert set(RECORDED) == set(GANGS["native"].versions)


@pytest.mark.promise("Clusters: A gang gets nodes for all of its pods, or takes none")
@pytest.mark.parametrize("version", RECORDED)
def test_native_groups_have_the_form_that_kubernetes_publishes(version: str) -> None:
    cases = itertools.product(
        ({"target": "pytorchjob", "elastic": "2:4"}, {"target": "job", "spares": 1}, {"target": "jobset"}),
        (None, "topology.kubernetes.io/rack", "topology.kubernetes.io/rack:preferred"),
        ({}, {"pods": {"priority_class": "high"}}),
    )
    for shape, topology, priority in cases:
        manifest, (group,) = rendered(job(gang="native", topology=topology, **shape, **priority))
        served = {**group, "apiVersion": f"scheduling.k8s.io/{version}"}
        jsonschema.validate(served, RECORDED[version]["PodGroup"])
        for role in TARGETS[shape["target"]].replicas(manifest).values():
            named = role.template["spec"]["schedulingGroup"]
            jsonschema.validate(named, RECORDED[version]["schedulingGroup"])
            assert named["podGroupName"] == group["metadata"]["name"]


@pytest.mark.parametrize(("gang", "has"), [("native", True), ("volcano", True), ("coscheduling", False)])
def test_the_group_has_the_priority_of_its_pods_where_it_has_one(gang: str, has: bool) -> None:
    """A group of Kubernetes 1.37 and of Volcano without a class has priority 0, whatever that of its pods is."""
    _, (group,) = rendered(job(gang=gang, pods={"priority_class": "high"}))
    assert group["spec"].get("priorityClassName") == ("high" if has else None)
    _, (without,) = rendered(job(gang=gang))
    assert "priorityClassName" not in without["spec"]


@pytest.mark.parametrize("version", RECORDED)
def test_a_native_group_that_waits_is_known_in_each_version(version: str) -> None:
    _, (group,) = rendered(job(gang="native"))
    said = {"type": RECORDED[version]["waiting"], "status": "False", "reason": "Unschedulable", "message": "1 pod fits"}
    group["status"] = {"conditions": [said]}
    message = "0/3 nodes are available: 3 Insufficient cpu."
    no_room = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    waiting = JobBuilder().all("pod", "Pending", {}, node="", conditions=[no_room])
    (found, *_) = find(waiting.view(pod_groups=[group]))
    assert (found.code, found.evidence[0].text) == ("WaitingForGang", "1 pod fits")


def served(fake: FakeApiServer, *versions: str) -> None:
    for version in versions:
        fake.objects[f"/apis/{version}/namespaces/team/podgroups"] = {}


@pytest.mark.promise("Clusters: A gang gets nodes for all of its pods, or takes none")
def test_a_gang_in_versions_that_flk_does_not_know_is_refused_and_not_left_out(
    fake: FakeApiServer, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flk.kube.discovery.KEPT", -1.0)  # what is served changes at once
    served(fake, "scheduling.k8s.io/v2")
    with pytest.raises(MissingApiError, match=r"serves podgroups.scheduling.k8s.io in version v2 only, .* v1beta1"):
        with_gang(client, job(gang="auto"))
    served(fake, "scheduling.volcano.sh/v1beta1")
    assert with_gang(client, job(gang="auto")).gang == "volcano"


@pytest.mark.parametrize("gang", GANGS)
def test_a_gang_scheduler_that_is_missing_says_how_to_get_it(fake: FakeApiServer, client: JobClient, gang: str) -> None:
    with pytest.raises(MissingApiError) as missing:
        client.api.served(POD_GROUPS[GANGS[gang].group])
    assert missing.value.hint == f"{GANGS[gang].install}, or choose another --gang"


def test_who_lacks_the_gangs_of_kubernetes_is_told_every_feature_gate() -> None:
    gates = ("GenericWorkload", "GangScheduling")  # of the cluster in tests/cluster/test_gang.py
    assert all(gate in GANGS["native"].install for gate in gates)


def test_without_a_gang_scheduler_auto_is_none(fake: FakeApiServer, client: JobClient) -> None:
    assert with_gang(client, job(gang="auto")).gang == "none"
