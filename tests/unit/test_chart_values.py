"""The chart says the same as `flk render` for the same job, and refuses values that flk.yaml would refuse."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from flk import labels
from flk.manifest import make_bundle, render
from flk.spec import defaults as namespace_defaults
from flk.spec.fabric import fabrics
from flk.spec.fields import TORCH_STRATEGIES
from flk.spec.job import DEFAULT_IMAGE, Job, validated
from flk_runtime import contract
from tests.support.commands import helm as helm_command

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "flk"
EXAMPLE = ["/opt/flk/examples/gpt/train.py"]


@pytest.fixture
def helm(tmp_path: Path) -> Any:
    """Runs helm with the values of a dict in a file; gives its exit code, documents and stderr."""

    def run(values: dict[str, Any], *args: str, release: str = "gpt") -> tuple[int, list[Any], str]:
        file = tmp_path / "values.json"
        file.write_text(json.dumps(values))
        done = helm_command("template", release, str(CHART), "--values", str(file), *args)
        return done.code, list(yaml.safe_load_all(done.stdout)) if done.code == 0 else [], done.stderr

    return run


def of_kind(documents: list[Any], kind: str) -> list[Any]:
    return [document for document in documents if document and document["kind"] == kind]


def normal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with what has no order in one order, and the job on record as data."""
    manifest = json.loads(json.dumps(manifest))
    annotations = manifest["metadata"]["annotations"]
    annotations[labels.SPEC] = json.loads(annotations[labels.SPEC])
    for container in manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]:
        container.get("env", []).sort(key=lambda variable: variable["name"])
    return manifest


def rendered(job: Job, folder: Path) -> dict[str, Any]:
    return normal(render(job, make_bundle(job, folder))[0])


JOBS: dict[str, dict[str, Any]] = {
    "nothing but a name": {},
    "command as text": {"command": "train.py  --lr 3e-4 --name=a"},
    "a module, and words that YAML or Kubernetes would change": {
        "command": ["-m", "pkg.train", "1e3", "yes", "", "$(HOME)", "$$", "a b", "é\n", "{{ .Values }}", "0x1f"],
    },
    "gpus": {"replicas": 16, "resources": {"cpu": 8, "memory": "64Gi", "gpu": 8, "shm": "16Gi"}, "fabric": "efa"},
    "amounts": {"resources": {"cpu": 0.5, "memory": 4294967296, "shm": 1000000000}, "processes": 2},
    "rights and limits": {
        "restarts": 0,
        "disruptions": 0,
        "deadline": "1d2h90m",
        "grace": "90s",
        "save_every": 1000000,
        "strategy": "none",
    },
    "a strategy as torch writes it": {"strategy": "_HYBRID_SHARD_ZERO2"},
    "durations in seconds": {"deadline": 5400, "grace": 600, "replicas": 100000, "restarts": 100000},
    "hang timeout": {"hang_timeout": "10m"},
    "no hang timeout": {"hang_timeout": 0},
    "volumes": {
        "checkpoint": "shared:/data//ckpt/",
        "volumes": ["corpus:/corpus", "shared:/again", "other:/a/./b"],
    },
    "checkpoint as fields": {"checkpoint": {"volume": "c", "path": "/c"}},
    "environment": {
        "env": {
            "LR": "3e-4",
            "EMPTY": "",
            "NCCL_IB_TC": "",
            "DOLLAR": "$(LR) $5",
            "NCCL_NET": "IB",
            "FLK_SEED": "7",
            "B": "true",
        },
        "secrets": {"WANDB_API_KEY": "wandb:key", "NCCL_IB_DISABLE": "s:ib"},
        "fabric": "socket",
    },
    "nodes and a queue": {
        "queue": "team",
        "nodes": {
            "selector": {"pool": "gpu", "zone": "1"},
            "tolerations": ["gpu=yes:NoSchedule", "gpu:NoExecute", "a=", "b", {"operator": "Exists"}],
        },
    },
    "toleration in full": {
        "nodes": {"tolerations": [{"key": "k", "value": "v", "effect": "NoExecute", "tolerationSeconds": 0}]}
    },
    "patch": {
        "patch": {
            "metadata": {"annotations": {"sidecar.istio.io/inject": None, "team": "a"}, "labels": {"x": "1"}},
            "spec": {
                "priorityClassName": "high",
                "terminationGracePeriodSeconds": 3000000,
                "automountServiceAccountToken": None,
                "securityContext": {"runAsUser": 5},
                "containers": [
                    {
                        "name": "pytorch",
                        "resources": {"limits": {"nvidia.com/gpu": "4"}},
                        "env": [{"name": "FLK_STRATEGY", "value": "none"}, {"name": "NEW", "value": "1"}],
                        "volumeMounts": [{"mountPath": "/dev/shm", "readOnly": True}, {"mountPath": "/n", "name": "n"}],
                        "securityContext": {"capabilities": {"add": ["IPC_LOCK"], "drop": []}},
                    },
                    {"name": "sidecar", "image": "x", "command": ["sleep", None]},
                ],
                "volumes": [{"name": "n", "emptyDir": {"medium": None}}, {"name": "shm", "emptyDir": {}}],
            },
        },
    },
    "settings of the pods": {
        "pods": {
            "labels": {"team": "vision", "kueue.x-k8s.io/priority-class": "high"},
            "annotations": {"example.com/note": "a: {b}\n$(C)", "sidecar.istio.io/inject": "true"},
            "service_account": "trainer",
            "pull_secrets": ["registry", "mirror"],
            "priority_class": "high",
        }
    },
    "labels only": {"pods": {"labels": {"team": "vision"}}},
    "GPUs of another vendor": {"resources": {"cpu": 1, "extended": {"amd.com/gpu": 8, "rdma/hca": 1}}},
    "network of the node": {"replicas": 2, "patch": {"spec": {"hostNetwork": True}}},
    "network of the pod": {"replicas": 2, "patch": {"spec": {"hostNetwork": False}}},
    "empty values": {"env": {"NCCL_IB_HCA": ""}, "fabric": "roce"},
    "limits of the fabric for a part of a node": {"fabric": "efa", "resources": {"gpu": 2, "memory": "1Gi"}},
    "a limit of the fabric": {"fabric": "infiniband", "resources": {"memory": "1Gi", "cpu": "1"}},
    **{f"fabric {name}": {"fabric": name, "resources": {"gpu": 8, "memory": "64Gi"}} for name in fabrics()},
}


@pytest.mark.parametrize("values", JOBS.values(), ids=JOBS.keys())
def test_chart_renders_what_flk_renders(values: dict[str, Any], helm: Any, tmp_path: Path) -> None:
    job = validated({"command": EXAMPLE, **values, "name": "gpt", "ship": False})
    code, documents, stderr = helm({"job": {"enabled": True, **values}})
    assert code == 0, stderr
    assert normal(of_kind(documents, "PyTorchJob")[0]) == rendered(job, tmp_path)


def test_chart_takes_the_sites_defaults_as_flk_does(helm: Any, tmp_path: Path) -> None:
    defaults = {
        "image": "team/torch:2",
        "fabric": "socket",
        "queue": "team",
        "tolerations": ["gpu:NoSchedule", "own=1:NoExecute"],
    }
    values = {"replicas": 2, "nodes": {"tolerations": ["own=1:NoExecute"]}}
    code, documents, stderr = helm({"job": {"enabled": True, **values}, "defaults": defaults})
    assert code == 0, stderr
    config = of_kind(documents, "ConfigMap")[0]
    assert config["metadata"]["labels"][labels.DEFAULTS] == "true"
    read = namespace_defaults.parse([("defaults", config["data"][labels.DEFAULTS_KEY])])
    job = namespace_defaults.apply(validated({"command": EXAMPLE, **values, "name": "gpt", "ship": False}), read)
    assert job.image == "team/torch:2"
    assert normal(of_kind(documents, "PyTorchJob")[0]) == rendered(job, tmp_path)


def test_pods_recognise_each_other_by_a_secret(helm: Any) -> None:
    several = {"enabled": True, "replicas": 2}
    (secret,) = of_kind(helm({"job": several})[1], "Secret")
    assert secret["metadata"]["name"] == "gpt-rendezvous"
    assert len(base64.b64decode(secret["data"]["secret"])) == 43
    assert of_kind(helm({"job": {"enabled": True, "replicas": 1}})[1], "Secret") == []
    assert of_kind(helm({"job": several, "rendezvousSecret": False})[1], "Secret") == []


PATCHES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "data" / "patches.yaml").read_text())
PATCHER = """{{ range .Values.cases }}{{ $case := fromJson . }}
---
{{ include "flk.patched" (dict "base" $case.base "patch" $case.patch "path" "patch") }}
{{- end }}"""


@pytest.fixture
def patch_in_chart(tmp_path: Path) -> Any:
    """Runs the chart's own merge of patches on cases: gives the results, and stderr."""
    folder = tmp_path / "patcher"
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: patcher\nversion: 0.0.0\n")
    (folder / "templates" / "_job.tpl").write_text((CHART / "templates" / "_job.tpl").read_text())
    (folder / "templates" / "cases.yaml").write_text(PATCHER)

    def run(cases: list[dict[str, Any]]) -> tuple[list[Any], str]:
        # As text: Helm drops null from values.
        (folder / "values.yaml").write_text(yaml.safe_dump({"cases": [json.dumps(case) for case in cases]}))
        done = helm_command("template", "x", str(folder))
        return [document["value"] for document in yaml.safe_load_all(done.stdout) if document], done.stderr

    return run


def test_chart_merges_patches_as_flk_does(patch_in_chart: Any) -> None:
    cases = [case for case in PATCHES if "result" in case]
    results, stderr = patch_in_chart(cases)
    assert len(results) == len(cases) > 10, stderr
    for case, result in zip(cases, results, strict=True):
        assert result == case["result"], case["name"]


@pytest.mark.parametrize("case", [case for case in PATCHES if "error" in case], ids=lambda case: case["name"])
def test_chart_refuses_patches_that_flk_refuses(case: dict[str, Any], patch_in_chart: Any) -> None:
    results, stderr = patch_in_chart([case])
    assert results == []
    assert f"patch{case['error']}" in stderr


def test_no_defaults_no_config_map_and_no_job_unless_enabled(helm: Any) -> None:
    kinds = sorted(document["kind"] for document in helm({})[1] if document)
    assert kinds == ["Pod", "Role", "RoleBinding", "ServiceAccount"]
    assert helm({"rbac": {"create": False}})[1] == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt value": ({"job": {"replicsa": 4}}, "replicsa"),
    "misspelt block": ({"jobs": {}}, "jobs"),
    "no replicas": ({"job": {"replicas": 0}}, "replicas"),
    "replicas as text": ({"job": {"replicas": "4"}}, "replicas"),
    "upper case": ({"job": {"name": "Gpt"}}, "name"),
    "newline": ({"job": {"name": "gpt\n"}}, "name"),
    "too long with its replicas": ({"job": {"enabled": True, "name": "a" * 54, "replicas": 11}}, "too long"),
    "unknown strategy": ({"job": {"strategy": "zero3"}}, "strategy"),
    "unknown fabric": ({"job": {"fabric": "token-ring"}}, "fabric"),
    "duration": ({"job": {"deadline": "soon"}}, "deadline"),
    "no time": ({"job": {"enabled": True, "deadline": "0s"}}, "deadline"),
    "no grace": ({"job": {"enabled": True, "grace": 0}}, "grace"),
    "quotes in a command as text": ({"job": {"command": "train.py 'a b'"}}, "command"),
    "relative mount": ({"job": {"volumes": ["claim:data"]}}, "volumes"),
    "number as environment": ({"job": {"env": {"A": 1}}}, "env"),
    "plain secret": ({"job": {"secrets": {"A": "value"}}}, "secrets"),
    "patch that removes the container": (
        {"job": {"enabled": True, "patch": {"spec": {"containers": None}}}},
        "job.patch: leaves no container named pytorch, which the operator looks for",
    ),
    "patch of another shape": (
        {"job": {"enabled": True, "patch": {"spec": {"volumes": 3}}}},
        "job.patch.spec.volumes: must be a list, as in the pod template (is 3)",
    ),
    "huge pages without memory": (
        {"job": {"enabled": True, "fabric": "efa", "resources": {"gpu": 8}}},
        "job.resources.memory: is missing: fabric efa requests hugepages-2Mi",
    ),
    "unknown default": ({"defaults": {"fabrik": "auto"}}, "fabrik"),
    "subject without a name": ({"rbac": {"subjects": [{"kind": "Group"}]}}, "subjects"),
}


@pytest.mark.parametrize(("values", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_values_are_refused_by_name(values: dict[str, Any], says: str, helm: Any) -> None:
    code, _, stderr = helm(values)
    assert code != 0
    assert says in stderr


def test_release_whose_name_is_no_jobs_name_is_refused(helm: Any) -> None:
    assert helm({"job": {"enabled": True}}, release="1gpt")[0] != 0
    assert helm({"job": {"enabled": True, "name": "gpt"}}, release="1gpt")[0] == 0


def test_schema_knows_the_same_fields_fabrics_and_reserved_names() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    fields = Job.model_fields.keys() - {"ship"} | {"enabled"}
    assert schema["properties"]["job"]["properties"].keys() == values["job"].keys() == fields
    assert set(schema["definitions"]["fabric"]["enum"]) == {"", None, *fabrics()}
    strategies = schema["properties"]["job"]["properties"]["strategy"]["enum"]
    assert strategies == [*contract.STRATEGIES, *TORCH_STRATEGIES]
    assert namespace_defaults.NamespaceDefaults.model_fields.keys() == values["defaults"].keys()
    names = [*contract.RESERVED_NAMES, *(f"{prefix}X" for prefix in contract.RESERVED_PREFIXES), *contract.SETTABLE]
    for name in [*names, "LR", "RANKS", "MY_RANK", "PETS"]:
        check = jsonschema.Draft7Validator({"$ref": "#/definitions/variable", "definitions": schema["definitions"]})
        assert check.is_valid(name) != contract.is_reserved(name), name


def test_versions_and_images_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == contract.VERSION
    assert yaml.safe_load((CHART / "values.yaml").read_text())["test"]["image"] == DEFAULT_IMAGE["cpu"]
    assert f"version={contract.VERSION}\n" in (ROOT / "docker" / "build").read_text()


def test_role_of_the_chart_is_the_role_of_k8s(helm: Any) -> None:
    subjects = [{"kind": "Group", "name": "researchers"}, {"kind": "ServiceAccount", "name": "ci", "namespace": "ci"}]
    documents = helm({"rbac": {"subjects": subjects}})[1]
    role, binding = yaml.safe_load_all((ROOT / "k8s" / "rbac.yaml").read_text())
    assert of_kind(documents, "Role")[0]["rules"] == role["rules"]
    bound = of_kind(documents, "RoleBinding")[0]["subjects"]
    assert binding["subjects"][0] in bound
    assert subjects[1] in bound
