"""What flk and its chart create, against the API of each version of Kubernetes that flk accepts.

kubernetes_fields.yaml records which fields these are and since which version each exists. The soak test validates the
objects with the schemas that Kubernetes has published, which the package of PyPI that the record names brings.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from flk.manifest import Bundle, render
from flk.manifest.environment import rendezvous_secret
from flk.spec.job import validated
from flk.targets import TARGETS
from flk.targets.gang import GANGS
from tests.support.chart import JOB, ROOT, template
from tests.support.install import NOT_ALLOWED, cache, pip_install
from tests.support.requirements import locked, may_install, unavailable

RECORD: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("kubernetes_fields.yaml").read_text())
FIELDS: dict[str, dict[str, list[str]]] = RECORD["fields"]  # by the version that has brought them, and kind
OLDEST, *LATER = FIELDS
# Names are the user's own in these, or keys of the API.
FREE = (
    "annotations", "binaryData", "data", "labels", "limits", "matchLabels", "nodeSelector", "requests", "selector",
    "stringData",
)  # fmt: skip
BUNDLE = Bundle(runtime=b"runtime", code=b"code", script="train.py")

COMMON: dict[str, dict[str, Any]] = {
    "little": {},
    "much": {
        "replicas": 4,
        "image": "team/train:1",
        "resources": {"cpu": 1, "cpu_limit": 2, "memory": "1Gi", "shm": "1Gi", "gpu": "H100:8"},
        "deadline": "1h",
        "checkpoint": "models:/models",
        "metrics": "wandb",
        "queue": "team",
        "topology": "example.com/rack:preferred",
        "secrets": {"KEY": "wandb:key"},
        "volumes": ["data:/data:ro", "nfs://server/x:/x", "secret:s:/s", "configmap:c:/c", "hostpath:/h:/h"],
        "nodes": {
            "selector": {"pool": "gpu"},
            "tolerations": [{"key": "x", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
            "avoid": ["node-7"],
        },
        "pods": {"pull_secrets": ["registry"], "service_account": "train", "annotations": {"a": "b"}},
        "records": "flk-records",
    },
    "a required topology, and fast networks": {"replicas": 2, "topology": "example.com/rack", "fabric": "efa"},
    "DiLoCo": {"replicas": 2, "strategy": "diloco"},
}  # fmt: skip
# What needs a newer version than the oldest: the version, the target and the job.
NEWER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "an elastic Job": ("1.30", "job", {"elastic": "2:4"}),
    "a Job with spares": ("1.30", "job", {"replicas": 2, "spares": 1}),
    "a gang of Kubernetes": (
        "1.36",
        "job",
        {"replicas": 2, "gang": "native", "topology": "example.com/rack", "pods": {"priority_class": "high"}},
    ),
}
CHART = {
    "job": JOB | {"script": "print()", "command": ["train.py"], "target": "job", "replicas": 2},
    "records": {"enabled": True},
    "rbac": {"exec": True, "subjects": [{"kind": "User", "name": "a"}]},
    "networkPolicy": {"enabled": True, "restrictEgress": True, "ingress": [{"from": [{"podSelector": {}}]}]},
    "dashboard": {"enabled": True},
    "defaults": {"image": "team/train:1"},
    "trainingRuntime": {"create": True},
}


def of_kubernetes(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of Kubernetes' own kinds that an object is, or that a controller makes of its templates."""
    kind, spec = item["kind"], item.get("spec", {})
    if kind in ("PyTorchJob", "TrainJob"):
        roles = TARGETS[kind.lower()].replicas(item).values()
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": {}, **role.template} for role in roles]
    if kind == "ClusterTrainingRuntime":
        return of_kubernetes({"kind": "JobSet", **spec["template"]})
    if kind == "JobSet":
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}}
        return [found for each in spec["replicatedJobs"] for found in of_kubernetes(job | each["template"])]
    if kind == "Job":
        return [item, {"apiVersion": "v1", "kind": "Pod", "metadata": {}, **spec["template"]}]
    return [item]


def created(target: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    job = validated({"command": "train.py", "name": "gpt", "target": target, **fields})
    manifest, *others = render(job, BUNDLE, namespace="team")
    with_uid = {**manifest, "metadata": {**manifest["metadata"], "uid": "u"}}
    return [found for item in (manifest, *others, rendezvous_secret(with_uid, "s")) for found in of_kubernetes(item)]


@functools.cache
def everywhere() -> list[dict[str, Any]]:
    """What every cluster gets: the jobs of all targets, and the objects of the chart and of k8s."""
    found = [item for target in TARGETS for fields in COMMON.values() for item in created(target, fields)]
    found += created("job", {"pods": {"priority_class": "high"}, "ttl": "1h"})  # which a TrainJob cannot have
    files = [yaml.safe_load_all((ROOT / "k8s" / name).read_text()) for name in ("rbac.yaml", "training-runtime.yaml")]
    chart = template(CHART)
    assert chart.code == 0, chart.stderr
    others = [*chart.documents, *(item for documents in files for item in documents)]
    return [*found, *(each for item in others for each in of_kubernetes(item))]


def paths(value: Any, path: str = "") -> Iterator[str]:
    """The innermost fields of an object, as kubectl explain names them. The pods of a Job are objects of their own."""
    for item in value if isinstance(value, list) and value else [value]:
        inner = item if isinstance(item, dict) and path.rpartition(".")[2] not in FREE else {}
        if not inner:
            yield path
        for key, each in inner.items():
            if (path, key) != ("spec", "template"):
                yield from paths(each, f"{path}.{key}" if path else key)


def fields_of(items: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(item["kind"], path) for item in items for path in paths(item)}


def known(*versions: str) -> set[tuple[str, str]]:
    return {(kind, path) for version in versions for kind, found in FIELDS[version].items() for path in found}


@pytest.mark.promise("Clusters: What flk creates has only fields that Kubernetes 1.29 knows, but for named exceptions")
def test_every_field_is_one_of_the_oldest_kubernetes() -> None:
    assert fields_of(everywhere()) == known(OLDEST)


@pytest.mark.parametrize("name", NEWER)
def test_what_needs_a_newer_kubernetes_has_no_field_of_a_still_newer_one(name: str) -> None:
    version, target, fields = NEWER[name]
    new = fields_of(created(target, fields)) - known(OLDEST)
    assert new
    assert new <= known(version)


def test_each_field_of_a_newer_kubernetes_is_rendered() -> None:
    found = set().union(*(fields_of(created(target, fields)) for _, target, fields in NEWER.values()))
    assert known(*LATER) - found == set()


def schemas() -> Path:
    """The folder of the schemas, which are installed once and kept in the cache."""
    if not may_install():
        unavailable(NOT_ALLOWED)
    folder = cache() / RECORD["package"].replace("==", "-")
    with locked(folder.name):
        if not (folder / "made").exists():
            if reason := pip_install(folder, "--no-deps", RECORD["package"]):
                unavailable(reason)
            (folder / "made").touch()
    return folder / "kubernetes_validate" / "kubernetes-json-schema"


def file_of(item: dict[str, Any]) -> str:
    group, _, version = item["apiVersion"].rpartition("/")
    return "-".join(filter(None, (item["kind"].lower(), group.partition(".")[0], version))) + ".json"


def served(item: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An object in the version of its API that a cluster with these schemas has, as `flk submit` creates it."""
    if item["kind"] != "PodGroup":
        return item
    versions = [{**item, "apiVersion": f"{GANGS['native'].group}/{version}"} for version in GANGS["native"].versions]
    return next((each for each in versions if (folder / file_of(each)).exists()), item)


def mistakes(items: list[dict[str, Any]], folder: Path) -> list[str]:
    """What the schemas in a folder have against objects; they allow no field that they do not know."""

    def load(name: str) -> Resource[Any]:
        return Resource.opaque(json.loads((folder / Path(name).name).read_text()))

    registry: Registry[Any] = Registry(retrieve=functools.cache(load))  # type: ignore[call-arg]
    found = []
    for item in (served(item, folder) for item in items):
        if not (folder / file_of(item)).exists():
            found.append(f"no {item['apiVersion']} {item['kind']}")
            continue
        for error in Draft202012Validator({"$ref": file_of(item)}, registry=registry).iter_errors(item):
            found.append(f"{item['kind']} {error.json_path}: {error.message[:300]}")
    return found


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(29, 38)])
def test_objects_fit_the_published_schemas(version: str) -> None:
    folder = schemas() / f"v{version}.0-local-strict"
    assert mistakes(everywhere(), folder) == []
    for name, (since, target, fields) in NEWER.items():
        is_new = tuple(map(int, version.split("."))) >= tuple(map(int, since.split(".")))
        assert bool(mistakes(created(target, fields), folder)) is not is_new, name
