"""The chart renders what `flk render` prints for the same job: each value with each target, values that text could
change, and jobs that come as a manifest."""

from __future__ import annotations

import copy
import json
import operator
from typing import Any

import pytest

from flk.manifest import Bundle, render, to_yaml
from flk.spec import defaults as namespace_defaults
from flk.spec import labels
from flk.spec.job import Job, validated
from flk.targets import TARGETS
from flk_runtime.contract import pod_layout
from scripts.chart.values import JOB_FIELDS
from tests.support.chart import template, templates

COMMAND = ["train.py"]
GPU = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
OWN = {"key": "own", "value": "1", "effect": "NoExecute"}
KINDS = {target.kind for target in TARGETS.values()}


def normal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with what has no order in one order, and without the job on record and the volume of the runtime.

    test_code.py compares the runtime.
    """
    manifest = copy.deepcopy(manifest)
    del manifest["metadata"]["annotations"][labels.SPEC]
    normalize(manifest["spec"])
    return manifest


def normalize(part: Any) -> None:
    """The same for each part of the spec, in place: a TrainJob has the pieces of its container in several places."""
    if isinstance(part, list):
        for item in part:
            normalize(item)
    if not isinstance(part, dict):
        return
    for name, identity in (("env", "name"), ("volumes", "name"), ("volumeMounts", "mountPath")):
        if name in part:
            part[name] = sorted(
                (item for item in part[name] if item["name"] != "ship"), key=operator.itemgetter(identity)
            )
    runtime = f"{pod_layout.SHIP_FOLDER}/{pod_layout.RUNTIME_ARCHIVE}"
    if runtime in part.get("command", []):
        start = part["command"].index(runtime)
        part["command"][start : start + 1] = ["-m", "flk_runtime"]
    for value in part.values():
        normalize(value)


def rendered(job: Job) -> list[dict[str, Any]]:
    manifest, *others = render(job, Bundle())
    return [normal(manifest), *others]


def the_job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = [document for document in documents if document["kind"] in KINDS]
    return job


def of_chart(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The objects of templates/job.yaml among these. Helm sorts them."""
    return [normal(the_job(documents)), *(document for document in documents if document["kind"] == "Service")]


def job_of(fields: dict[str, Any]) -> Job:
    return validated({"command": COMMAND, "name": "gpt", **fields})


# Values of each field of a job of the chart. The target is each of them.
SAMPLES: dict[str, list[Any]] = {
    "name": ["other"],
    "image": ["registry.example.com:5000/team/torch:2"],
    "replicas": [3, 100000],
    "processes": [2],
    "resources": [
        {"cpu": "500m"},
        {"cpu": 2, "memory": "8Gi", "gpu": 2, "shm": "1Gi"},
        {"cpu": 0.5, "memory": 4294967296, "shm": 1000000000},
    ],
    "strategy": ["full_shard", "none"],
    "checkpoint": ["ckpt:/ckpt", "ckpt:/./a//b/", "s3://models/gpt", "s3://models/gpt//"],
    "queue": ["team"],
    "env": [
        {"A": "$(B) $5", "NCCL_DEBUG": "INFO", "EMPTY": "", "FLK_SEED": "7", "TRUE": "true"},
        {"HOME": "/home/$me", "A": "日本語\t\u202e\x1b[31m", "B": "a\nb", "C": " ", "D_E": "{{ .Values }}"},
    ],
    "secrets": [{"KEY": "secret:key", "FLK_SEED": "secret:seed"}],
    "volumes": [["data:/data/:ro", "other:/a/./b"]],
    "nodes": [
        {"selector": {"pool": "gpu", "empty": ""}, "tolerations": [{"key": "b", "operator": "Exists"}]},
        {"selector": {"kubernetes.io/arch": "arm64"}},
        {"selector": {"kubernetes.io/arch": ""}},
    ],
    "patch": [
        {"metadata": {"labels": {"x": "1"}}, "spec": {"securityContext": {"runAsUser": 5, "runAsNonRoot": False}}}
    ],
}
JOBS: dict[str, dict[str, Any]] = {
    f"{name} {value} of a {target}": {"target": target, name: value}
    for name, values in SAMPLES.items()
    for value in values
    for target in TARGETS
} | {
    "nothing but a name": {},
    "a volume at two paths, and the checkpoint on it": {"checkpoint": "a:/c", "volumes": ["a:/x", "a:/y"]},
    "a home and no other variable": {"env": {"HOME": "/x"}},
    "an empty home": {"env": {"HOME": ""}},
    "a home from a secret": {"secrets": {"HOME": "secret:home"}},
    "words that YAML or Kubernetes would change": {
        "command": ["-m", "pkg.train", "1e3", "yes", "", "$(HOME)", "$$", "a b", "é\n", "{{ .Values }}", "0x1f"],
    },
    "a toleration in full": {
        "nodes": {"tolerations": [{"key": "k", "value": "v", "effect": "NoExecute", "tolerationSeconds": 0}]}
    },
}


@pytest.fixture(scope="module")
def charts() -> dict[str, list[dict[str, Any]]]:
    """What the chart renders for all jobs, by their names. Starting Helm for each would take a minute."""
    return templates({name: {"job": {"enabled": True, "command": COMMAND, **job}} for name, job in JOBS.items()})


@pytest.mark.promise("Clusters: The chart renders what flk render prints")
@pytest.mark.xdist_group("parity")  # the fixture is made once
@pytest.mark.parametrize("name", JOBS)
def test_chart_renders_what_flk_renders(name: str, charts: dict[str, list[dict[str, Any]]]) -> None:
    assert of_chart(charts[name]) == rendered(job_of(JOBS[name]))
    on_record = validated(json.loads(the_job(charts[name])["metadata"]["annotations"][labels.SPEC]))
    assert rendered(on_record) == of_chart(charts[name])


def test_every_value_is_compared() -> None:
    assert {*SAMPLES, "target"} == set(JOB_FIELDS)


@pytest.mark.parametrize("target", TARGETS)
def test_any_other_job_comes_as_its_manifest(target: str) -> None:
    elastic = {"elastic": "1:4"} if target in ("pytorchjob", "job") else {"topology": "rack"}
    job = validated({"name": "other", "command": COMMAND, "target": target, "deadline": "2h", "replicas": 2, **elastic})
    manifests = render(job, Bundle())
    text = to_yaml(manifests).replace("\n", "\r\n")
    values = {"job": {"enabled": True, "manifest": text}, "networkPolicy": {"enabled": True}}
    chart = template(values)
    found = [document for document in chart.documents if document["metadata"]["name"] == "other"]
    assert sorted(found, key=str) == sorted(manifests, key=str)
    assert chart.one("ConfigMap")["metadata"]["name"] == "other-runtime-0"
    assert chart.one("Secret")["metadata"]["name"] == "other-rendezvous"
    assert chart.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"][labels.JOB] == "other"


@pytest.mark.parametrize("empty", [None, ""])
def test_an_empty_value_is_the_default(empty: str | None) -> None:
    # Helm drops null from the values, the chart's default with it, before it checks them.
    may_be_empty = ("name", "image", "replicas", "processes", "checkpoint", "queue", "target")
    values = {"job": {"enabled": True, "command": COMMAND, **dict.fromkeys(may_be_empty, empty)}}
    assert of_chart(template(values).documents) == rendered(job_of({}))


def test_the_job_takes_defaults_of_the_site() -> None:
    defaults = {"image": "team/torch:2", "queue": "team", "tolerations": [GPU, OWN]}
    values = {"command": COMMAND, "replicas": 2, "nodes": {"tolerations": [OWN]}}
    chart = template({"job": {"enabled": True, **values}, "defaults": defaults})
    (config,) = [c for c in chart.of_kind("ConfigMap") if c["metadata"]["labels"].get(labels.DEFAULTS) == "true"]
    read = namespace_defaults.parse([("defaults", config["data"][labels.DEFAULTS_KEY])])
    job = namespace_defaults.apply(validated({**values, "name": "gpt"}), read)
    assert job.image == "team/torch:2"
    assert of_chart(chart.documents) == rendered(job)
