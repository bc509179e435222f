"""Manifests: what is rendered, and how it is written as text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flk.errors import UsageError
from flk.manifest import Bundle
from flk.manifest.pod import pod_template
from flk.manifest.render import render, to_json, to_yaml
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


# Everything that any version of YAML, or a lenient parser, has ever read as a number, a truth value or nothing.
SPECIAL = re.compile(r"[-+.]?[0-9].*|[-+]?\.?(inf|nan)(inity)?|y|n|yes|no|on|off|true|false|null|~|", re.IGNORECASE)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),  # noqa: E501
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=5))
def test_what_is_written_reads_the_same(data: dict[str, Any]) -> None:
    assert list(yaml.safe_load_all(to_yaml([data, data]))) == [data, data]
    assert json.loads(to_json([data]))["items"] == [data]


@pytest.mark.parametrize(
    "text",
    ["1e3", "1_000", "0o17", "0x1F", "12:30:45", "y", "Off", "null", "~", ".5", "+1", "NaN", ".inf", "2026-01-01"],
)
def test_text_that_looks_like_something_else_is_quoted(text: str) -> None:
    assert f'value: "{text}"' in to_yaml([{"value": text}])


@given(st.from_regex(r"\A[-+.~A-Za-z0-9_/:]{0,12}\Z"))
def test_what_is_not_quoted_looks_like_nothing_else(text: str) -> None:
    line = to_yaml([{"value": text}]).splitlines()[-1]
    if line == f"value: {text}":
        assert not SPECIAL.fullmatch(text)
