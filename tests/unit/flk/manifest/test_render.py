"""Rendering beyond the golden files: patches, and what must not depend on anything but the arguments."""

from __future__ import annotations

from typing import Any

import pytest

from flk.errors import UsageError
from flk.health.cluster import is_selected
from flk.manifest import Bundle
from flk.manifest.pod import pod_template
from flk.manifest.render import render
from flk.spec.job import validated


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"spec": 3}, "patch.spec: must be a mapping, as in the pod template (is 3)"),
        ({"spec": {"containers": 3}}, "patch.spec.containers: must be a list, as in the pod template (is 3)"),
        (
            {"spec": {"containers": [{"name": "pytorch", "env": {}}]}},
            "patch.spec.containers[pytorch].env: must be a list, as in the pod template (is {})",
        ),
        ({"spec": None}, "patch: leaves no container named pytorch, which the operator looks for"),
        ({"spec": {"containers": None}}, "patch: leaves no container named pytorch, which the operator looks for"),
        ({"spec": {"containers": [3]}}, "patch: leaves no container named pytorch, which the operator looks for"),
    ],
)
def test_patches_that_leave_no_pod_are_refused(patch: Any, message: str) -> None:
    job = validated({"command": "a.py", "name": "n", "patch": patch})
    with pytest.raises(UsageError) as caught:
        render(job, Bundle())
    assert str(caught.value) == message


def test_a_node_has_the_type_of_gpus_and_is_none_to_avoid() -> None:
    """One of the terms is enough, so that each must leave the node out."""
    job = validated(
        {"name": "n", "command": "train.py", "nodes": {"avoid": ["a"]}, "resources": {"gpu": 1, "gpu_type": "H100"}}
    )
    affinity = pod_template(job, Bundle(runtime=b"x"), ["runtime-0"])["spec"]["affinity"]
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert len(terms) > 2
    assert all(term["matchFields"][0]["values"] == ["a"] and term["matchExpressions"] for term in terms)


def test_avoided_nodes_are_an_affinity_by_name_beside_that_of_the_topology() -> None:
    """The API server takes one name in each expression on a field."""
    job = validated({"name": "n", "command": "train.py", "nodes": {"avoid": ["a", "b.c"]}, "topology": "rack"})
    spec = pod_template(job, Bundle(runtime=b"x"), ["runtime-0"])["spec"]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {
        "matchFields": [
            {"key": "metadata.name", "operator": "NotIn", "values": ["a"]},
            {"key": "metadata.name", "operator": "NotIn", "values": ["b.c"]},
        ]
    }
    assert "podAffinity" in spec["affinity"]
    nodes = [{"metadata": {"name": name, "labels": {}}} for name in ("a", "b.c", "c")]
    assert [is_selected(node, spec) for node in nodes] == [False, False, True]


def test_equal_arguments_give_equal_manifests_that_share_nothing() -> None:
    job = validated({"command": "a.py", "name": "n", "fabric": "efa", "nodes": {"selector": {"a": "b"}}})
    first, second = render(job, Bundle()), render(job, Bundle())
    assert first == second
    first[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["nodeSelector"]["a"] = "c"
    first[0]["metadata"]["labels"]["x"] = "y"
    assert render(job, Bundle()) == second
    assert "x" not in first[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]["labels"]


def test_a_submission_is_on_record() -> None:
    job = validated({"command": "a.py", "name": "n"})
    annotations = render(job, Bundle(), submission="id", owner="ada@host")[0]["metadata"]["annotations"]
    assert (annotations["flk.dev/submission"], annotations["flk.dev/owner"]) == ("id", "ada@host")
    assert "flk.dev/code-hash" not in annotations


def endpoint(name: str, namespace: str | None, patch: Any = None) -> str:
    """The address of the launcher of pod 0, which must also be a port of the container."""
    data = {"command": "a.py", "name": name, **({"patch": patch} if patch else {})}
    template = render(validated(data), Bundle(), namespace=namespace)[0]["spec"]["pytorchReplicaSpecs"]["Worker"]
    container = template["template"]["spec"]["containers"][0]
    (address,) = [each["value"] for each in container["env"] if each["name"] == "FLK_RDZV_ENDPOINT"]
    assert address.endswith(f":{container['ports'][0]['containerPort']}")
    return str(address)


def test_jobs_that_share_the_address_of_a_node_have_ports_of_their_own() -> None:
    host = {"spec": {"hostNetwork": True}}
    assert endpoint("gpt", None) == endpoint("gpt", "team", {"spec": {"hostNetwork": False}}) == "gpt-worker-0:29400"
    assert endpoint("gpt", "team", host) == endpoint("gpt", "team", host)
    names = [(name, namespace) for name in ("gpt", "gpt-2", "bert", "a" * 50) for namespace in (None, "team", "other")]
    ports = {int(endpoint(name, namespace, host).rpartition(":")[2]) for name, namespace in names}
    assert len(ports) == len(names)
    assert all(24_000 <= port < 29_000 for port in ports)
