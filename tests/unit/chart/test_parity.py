"""The chart renders the objects that `flk render` prints for the same job, over a table of jobs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk import labels
from flk.errors import UsageError
from flk.manifest import Bundle, render
from flk.spec import defaults as namespace_defaults
from flk.spec.fabric import fabrics
from flk.spec.fields import TORCH_STRATEGIES
from flk.spec.job import Job, validated
from flk.targets import TARGETS
from flk_runtime.contract import pod_env, pod_layout
from flk_runtime.contract.strategies import STRATEGIES
from tests.support.chart import CHART, ROOT, Rendered, template
from tests.support.commands import helm as helm_command

COMMAND = ["train.py"]
KINDS = {target.kind for target in TARGETS.values()}
IN_CHART = [name for name in STRATEGIES if name != "diloco"]  # whose workers need a secret made by flk submit


def normal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with what has no order in one order, and the job on record as data.

    The chart mounts the runtime, which `flk submit` packs into an archive, as single files: the volume is left out, and
    the runtime has one name. The next test file compares the files.
    """
    manifest = copy.deepcopy(manifest)
    annotations = manifest["metadata"]["annotations"]
    annotations[labels.SPEC] = json.loads(annotations[labels.SPEC])
    annotations.pop(labels.CODE_HASH, None)
    normalize(manifest["spec"])
    return manifest


def normalize(part: Any) -> None:
    """The same for each part of the spec, in place: a TrainJob has the pieces of its container in several places."""
    if isinstance(part, list):
        for item in part:
            normalize(item)
    if not isinstance(part, dict):
        return
    if "volumes" in part:
        part["volumes"] = [volume for volume in part["volumes"] if volume["name"] != "ship"]
    if "volumeMounts" in part:
        part["volumeMounts"] = [m for m in part["volumeMounts"] if m["mountPath"] != pod_layout.SHIP_FOLDER]
    if "env" in part:
        env = [variable for variable in part["env"] if variable["name"] not in (pod_env.CODE, pod_env.CODE_HASH)]
        part["env"] = sorted(env, key=lambda variable: variable["name"])
    runtime = f"{pod_layout.SHIP_FOLDER}/{pod_layout.RUNTIME_ARCHIVE}"
    if runtime in part.get("command", []):
        start = part["command"].index(runtime)
        part["command"][start : start + 1] = ["-m", "flk_runtime"]
    for value in part.values():
        normalize(value)


def compared(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The job's own object in its normal form, then its Service and its PodGroup, if it has them."""
    job, *others = manifests
    return [normal(job), *sorted(others, key=lambda manifest: str(manifest["kind"]))]


def rendered(job: Job) -> list[dict[str, Any]]:
    return compared(render(job, Bundle()))


def of_chart(chart: Rendered) -> list[dict[str, Any]]:
    """The objects of templates/job.yaml, which begins with the job. Helm sorts them."""
    assert chart.code == 0, chart.stderr
    jobs = [document for document in chart.documents if document["kind"] in KINDS]
    others = [document for document in chart.documents if document["kind"] in ("Service", "PodGroup")]
    assert len(jobs) == 1
    return compared([*jobs, *others])


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
        "ttl": "7d",
        "grace": "90s",
        "save_every": 1000000,
        "strategy": "none",
    },
    "an interval that is computed": {"save_every": "auto"},
    "a strategy as torch writes it": {"strategy": "_HYBRID_SHARD_ZERO2"},
    "durations in seconds": {"deadline": 5400, "ttl": 60, "grace": 600, "replicas": 100000, "restarts": 100000},
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
    "records": {"records": "team-records", "volumes": ["corpus:/corpus"]},
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
            "labels": {"team": "vision", "example.com/class": "high"},
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
    **{f"strategy {name}": {"strategy": name, "replicas": 3} for name in [*IN_CHART, *TORCH_STRATEGIES]},
    **{f"deadline {text}": {"deadline": text} for text in ("1s", "90", "61m", "25h", "9d", "1d1s", "100000000s")},
    **{f"grace {text}": {"grace": text} for text in ("1s", "60m", "2h30m", 3600)},
    **{f"{cpu} cores": {"resources": {"cpu": cpu}} for cpu in (4, 1.5, "250m", "16")},
    **{f"memory {size}": {"resources": {"memory": size, "shm": size}} for size in ("512Mi", "1.5Gi", "2G", 1000000)},
    "module with a path of several packages": {"command": ["-m", "team.vision.train", "--config", "a.yaml"]},
    "one argument that is empty": {"command": ["train.py", ""]},
    "script in a folder": {"command": ["src/train.py", "--lr", "0.1"]},
    "script of the image": {
        "command": "/opt/team/train.py --epochs 3",
        "image": "registry.example.com:5000/team/torch:2",
    },
    "image by its digest": {"image": "team/torch@sha256:" + "0" * 64},
    "most replicas": {"replicas": 100000, "disruptions": 100000, "restarts": 100000},
    "more ranks than GPUs": {"processes": 4, "resources": {"gpu": 2}},
    "a rank for each GPU of two vendors": {"resources": {"gpu": 1, "extended": {"amd.com/gpu": 2}}},
    "no hang timeout, as text": {"hang_timeout": "0s"},
    "hang timeout in seconds": {"hang_timeout": 45},
    "one claim at two paths, and the checkpoint on it": {"checkpoint": "a:/c", "volumes": ["a:/x", "a:/y"]},
    "checkpoint whose path ends with a slash": {"checkpoint": "ckpt:/a/"},
    "checkpoint in S3": {
        "checkpoint": "s3://models/gpt/",
        "keep": 5,
        "keep_every": 1000,
        "volumes": ["data:/data"],
        "secrets": {"AWS_ACCESS_KEY_ID": "s3:id"},
        "env": {"AWS_ENDPOINT_URL": "https://s3.example.com"},
    },
    "checkpoint in S3 as fields": {"checkpoint": {"address": "s3://models"}},
    "variables that only look reserved": {"env": {"RANKS": "1", "PETS": "2", "MY_WORLD_SIZE": "3", "A.B-C": "4"}},
    "settings of the runtime": {"env": {"FLK_PREFLIGHT": "-shm,-code", "FLK_LEASE": "30", "FLK_START": "spawn"}},
    "text of other alphabets": {"env": {"A": "日本語\t\u202e\x1b[31m", "B": "a\nb", "C": " "}},
    "variable of the fabric from a Secret": {"fabric": "efa", "secrets": {"FI_PROVIDER": "net:provider"}},
    "only a selector": {"nodes": {"selector": {"kubernetes.io/arch": "amd64", "empty": ""}}},
    "tolerations twice": {"nodes": {"tolerations": ["a:NoSchedule", "b=1"]}, "queue": "q.team"},
    "labels of other tools": {"pods": {"labels": {"example.com/cost-centre": "42", "a.b": ""}}},
    "only a service account": {"pods": {"service_account": "trainer.team"}},
    "patch of another container's probe": {
        "patch": {"spec": {"containers": [{"name": "pytorch", "livenessProbe": {"exec": {"command": ["true"]}}}]}}
    },
    "patch of the scheduler": {"patch": {"spec": {"schedulerName": "volcano", "topologySpreadConstraints": []}}},
    "patch that removes": {"patch": {"spec": {"securityContext": None, "enableServiceLinks": None}}},
    **{
        f"target {name}, {what}": {"target": name, "replicas": 3, **fields}
        for name in TARGETS
        for what, fields in {
            "plain": {},
            "in a queue": {"queue": "team", "queue_priority": "high"},
            "with everything": {
                "resources": {"cpu": 2, "memory": "8Gi", "gpu": 2, "shm": "1Gi", "extended": {"rdma/hca": 1}},
                "deadline": "2h",
                "ttl": "7d",
                "restarts": 1,
                "disruptions": 2,
                "grace": "1m",
                "checkpoint": "ckpt:/ckpt",
                "volumes": ["data:/data"],
                "env": {"A": "$(B)"},
                "secrets": {"KEY": "secret:key"},
                "nodes": {"selector": {"pool": "gpu"}, "tolerations": ["gpu:NoSchedule"]},
                "pods": {
                    "labels": {"team": "a"},
                    "annotations": {"b": "c"},
                    "pull_secrets": ["p"],
                    "service_account": "s",
                },
                "topology": "topology.kubernetes.io/rack:preferred",
            },
            "one pod": {"replicas": 1, "topology": "rack"},
        }.items()
    },
    **{
        f"gang {gang} of a {name}": {"target": name, "replicas": 4, "gang": gang, "pods": {"labels": {"a": "b"}}}
        for name in ("pytorchjob", "jobset", "job")
        for gang in ("native", "volcano", "coscheduling", "none")
    },
    "elastic": {"elastic": "2:4"},
    "elastic with fewer pods at first": {
        "elastic": {"min": 1, "max": 8, "batch": "scale"},
        "replicas": 3,
        "restarts": 1,
    },
    **{
        f"{what} of a {name}": {"target": name, **fields, **more}
        for name in TARGETS
        if TARGETS[name].scalable
        for what, fields, more in (
            ("spares", {"replicas": 2, "spares": 1}, {}),
            ("elastic pods", {"elastic": "2:4"}, {}),
            ("a gang with spares", {"replicas": 2, "spares": 1}, {"gang": "coscheduling"}),
            ("an elastic gang", {"elastic": "2:4"}, {"gang": "volcano"}),
            ("an elastic native gang", {"elastic": {"min": 2, "max": 4}, "replicas": 3}, {"gang": "native"}),
        )
    },
    "gang of one pod": {"gang": "native"},
    "gang with a priority": {"gang": "volcano", "replicas": 2, "pods": {"priority_class": "high"}},
    "patch of a TrainJob": {
        "target": "trainjob",
        "patch": {"spec": {"affinity": {"nodeAffinity": {}}, "containers": [{"name": "node", "env": [{"name": "X"}]}]}},
    },
    "own domain of a Job's pods": {"target": "job", "patch": {"spec": {"subdomain": "mine"}}},
    **{f"fabric {name}": {"fabric": name, "resources": {"gpu": 8, "memory": "64Gi"}} for name in fabrics()},
}


@pytest.mark.parametrize("values", JOBS.values(), ids=JOBS.keys())
def test_chart_renders_what_flk_renders(values: dict[str, Any]) -> None:
    job = validated({"command": COMMAND, **values, "name": "gpt"})
    chart = template({"job": {"enabled": True, **values}}, "--show-only", "templates/job.yaml")
    assert of_chart(chart) == rendered(job)


REFUSED: dict[str, dict[str, Any]] = {
    "priority of a TrainJob": {"pods": {"priority_class": "high"}},
    "gang of a TrainJob": {"gang": "volcano", "replicas": 2},
    "host network of a TrainJob": {"patch": {"spec": {"hostNetwork": True}}},
    "sidecar of a TrainJob": {"patch": {"spec": {"containers": [{"name": "sidecar", "image": "x"}]}}},
    "a volume of a TrainJob at two paths": {"volumes": ["data:/data", "data:/again"]},
    "probe of a TrainJob": {"patch": {"spec": {"containers": [{"name": "node", "livenessProbe": {}}]}}},
}


@pytest.mark.parametrize("values", REFUSED.values(), ids=REFUSED.keys())
def test_chart_refuses_what_a_train_job_cannot_set_in_the_words_of_flk(values: dict[str, Any]) -> None:
    chart = template({"job": {"enabled": True, "target": "trainjob", **values}})
    with pytest.raises(UsageError) as refused:
        rendered(validated({"command": COMMAND, "name": "gpt", "target": "trainjob", **values}))
    assert chart.code != 0
    assert str(refused.value).removeprefix("target: ") in chart.stderr


def test_the_table_has_at_least_sixty_jobs() -> None:
    assert len(JOBS) >= 60


def test_chart_takes_the_sites_defaults_as_flk_does() -> None:
    defaults = {
        "image": "team/torch:2",
        "fabric": "socket",
        "queue": "team",
        "tolerations": ["gpu:NoSchedule", "own=1:NoExecute"],
    }
    values = {"replicas": 2, "nodes": {"tolerations": ["own=1:NoExecute"]}}
    chart = template({"job": {"enabled": True, **values}, "defaults": defaults})
    (config,) = [c for c in chart.of_kind("ConfigMap") if c["metadata"]["labels"].get(labels.DEFAULTS) == "true"]
    read = namespace_defaults.parse([("defaults", config["data"][labels.DEFAULTS_KEY])])
    job = namespace_defaults.apply(validated({"command": COMMAND, **values, "name": "gpt"}), read)
    assert job.image == "team/torch:2"
    assert of_chart(chart) == rendered(job)


PATCHES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests" / "unit" / "flk" / "manifest" / "patches.yaml").read_text()
)
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
    (folder / "templates" / "_patch.tpl").write_text((CHART / "templates" / "_patch.tpl").read_text())
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
