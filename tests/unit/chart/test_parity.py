"""The chart renders the objects that `flk render` prints for the same job: each option with each target, pairs of the
options that shape a job, and values that text could change."""

from __future__ import annotations

import copy
import itertools
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
from flk.spec.options import rows
from flk.targets import TARGETS
from flk_runtime.contract import pod_env, pod_layout
from flk_runtime.contract.strategies import STRATEGIES
from tests.support.chart import CHART, ROOT, template, templates
from tests.support.commands import helm as helm_command
from tests.unit.flk.manifest.test_volumes import FORBIDDEN

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


def of_chart(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The objects of templates/job.yaml among these. Helm sorts them."""
    jobs = [document for document in documents if document["kind"] in KINDS]
    others = [document for document in documents if document["kind"] in ("Service", "PodGroup")]
    assert len(jobs) == 1
    return compared([*jobs, *others])


# Values of each option that are not its default; `.` leads into a part of the job.
SAMPLES: dict[str, list[Any]] = {
    "name": ["other"],
    "image": ["registry.example.com:5000/team/torch:2"],
    "image_pull_policy": ["Always"],
    "pip": [["torchmetrics>=1.4", "a @ https://example.com/a.whl?x=$(B)"]],
    "requirements": ["needs//all.txt", "/image/r.txt"],
    "accelerate_config": ["a//accelerate.yaml", "/image/accelerate.yaml"],
    "preload": ["transformers", "timm.data a_b.c1"],
    "on_restart": ["--init_from=resume", "--name 'a b'"],
    "setup": ["echo \"$HOME\" 'a' <b\n&& c\\d"],
    "command": ["train.py --lr 3e-4", ["-m", "team.train"]],
    "replicas": [3],
    "elastic": ["2:4", {"min": 1, "max": 8, "batch": "scale"}],
    "spares": [1],
    "processes": [2],
    "resources.cpu": ["500m", 2],
    "resources.memory": ["8Gi"],
    "resources.cpu_limit": ["4"],
    "resources.memory_limit": ["16Gi"],
    "resources.ephemeral_storage": ["100Gi"],
    "resources.gpu": [2, "h100:8"],
    "resources.gpu_type": ["T4"],
    "resources.shm": ["1Gi"],
    "resources.extended": [{"amd.com/gpu": 2, "rdma/hca": 1}],
    "strategy": ["full_shard", "none"],
    "fabric": ["socket", "infiniband"],
    "restarts": [0],
    "disruptions": [7],
    "deadline": ["90m"],
    "idle_timeout": ["30m"],
    "ttl": ["7d"],
    "stuck_after": ["30m"],
    "hang_timeout": ["10m", 0],
    "grace": ["2m"],
    "checkpoint": ["ckpt:/ckpt", "s3://models/gpt"],
    "save_every": [50, "auto"],
    "store_every": [500, "auto"],
    "memory_path": ["/nvme//flk/"],
    "metrics": ["tensorboard:/curves,mlflow", "none"],
    "keep": [5],
    "keep_every": [1000],
    "verify": [5],
    "queue": ["team"],
    "queue_priority": ["high"],
    "target": list(TARGETS),
    "gang": ["native", "volcano", "coscheduling"],
    "topology": ["rack", "topology.kubernetes.io/rack:preferred"],
    "env": [{"A": "$(B)", "NCCL_DEBUG": "INFO"}],
    "secrets": [{"KEY": "secret:key", "FLK_SEED": "secret:seed"}],
    "volumes": [
        ["data:/data/:ro", "nfs://fs.example.com/a//b/:/nfs", "nfs://10.0.0.1/:/root"],
        ["secret:keys:/keys:ro", "configmap:settings:/s", "hostpath:/mnt//x/:/x:ro", "data:/a", "data:/b:ro"],
    ],
    "claims": [["one-gpu", "nic.fast"]],
    "nodes.selector": [{"pool": "gpu"}],
    "nodes.tolerations": [["gpu:NoSchedule"]],
    "nodes.avoid": [["node-a", "node-b.example.com"]],
    "pods.labels": [{"team": "a"}],
    "pods.annotations": [{"b": "c"}],
    "pods.service_account": ["trainer"],
    "pods.pull_secrets": [["registry", "mirror"]],
    "pods.priority_class": ["high"],
    "records": ["team-records"],
    "patch": [{"metadata": {"labels": {"x": "1"}}, "spec": {"securityContext": {"runAsUser": 5}}}],
}
NEEDED: dict[str, dict[str, Any]] = {  # for the option to have an effect, or to be allowed
    "queue_priority": {"queue": "team"},
    "gang": {"replicas": 2},
    "resources.gpu_type": {"resources": {"gpu": 1}},
}


def united(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of both jobs, or None where both set one field to different values."""
    result = dict(one)
    for key, value in other.items():
        if key in ("nodes", "pods", "resources"):
            value = united(one.get(key, {}), value)
        elif one.get(key, value) != value:
            return None
        if value is None:
            return None
        result[key] = value
    return result


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The fields of a job with one option."""
    for name in reversed(path.split(".")):
        value = {name: value}
    fields = united(NEEDED.get(path, {}), value)
    assert fields is not None
    return fields


OPTIONS = {
    f"{path} {value} of a {target}": {"target": target, **with_value(path, value)}
    for path, values in SAMPLES.items()
    for value in values
    for target in TARGETS
}


def job_of(fields: dict[str, Any]) -> Job:
    return validated({"command": COMMAND, "name": "gpt", **fields})


def is_rendered(fields: dict[str, Any]) -> bool:
    try:
        rendered(job_of(fields))
    except UsageError:
        return False
    return True


# What shapes the objects of a job, in pairs.
SHAPES: dict[str, dict[str, Any]] = {
    "pods": {"replicas": 3},
    "elastic": {"elastic": "2:4", "replicas": 4},
    "few elastic pods": {"elastic": {"min": 2, "max": 4}, "replicas": 3},
    "spares": {"spares": 1},
    "native": {"gang": "native"},
    "volcano": {"gang": "volcano", "pods": {"priority_class": "high"}},
    "coscheduling": {"gang": "coscheduling"},
    "fabric": {"fabric": "efa", "resources": {"gpu": 2, "memory": "1Gi"}},
    "queue": {"queue": "team", "queue_priority": "high"},
    "limits": {"deadline": "2h", "ttl": "7d", "restarts": 1, "grace": "1m"},
    "place": {"checkpoint": "a:/c", "volumes": ["b:/x"], "records": "r", "topology": "rack"},
    "network": {"patch": {"spec": {"hostNetwork": True}}},
}
ONES = {
    (shape, target): {"replicas": 2, "target": target, **fields}
    for shape, fields in SHAPES.items()
    for target in TARGETS
}


def pairs() -> dict[str, dict[str, Any]]:
    """Jobs with two shapes, each of which flk accepts alone."""
    accepted = {each for each, fields in ONES.items() if is_rendered(fields)}
    return {
        f"{one} and {other} of a {target}": ONES[one, target] | ONES[other, target] | SHAPES[one]
        for one, other in itertools.combinations(SHAPES, 2)
        for target in TARGETS
        if {(one, target), (other, target)} <= accepted
    }


JOBS: dict[str, dict[str, Any]] = {
    "nothing but a name": {},
    **{f"nothing but the target {name}": {"target": name} for name in TARGETS},
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
    "hang timeouts by phase": {"hang_timeout": "600,step=5m,save=1h"},
    "no hang timeout": {"hang_timeout": 0},
    "volumes": {
        "checkpoint": "shared:/data//ckpt/",
        "volumes": ["corpus:/corpus", "shared:/again", "other:/a/./b"],
    },
    "a disk of the node": {"memory_path": "/ssd/flk", "volumes": ["data:/s", "hostpath:/mnt/ssd:/ssd", "data:/ssd/f"]},
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
    "avoided nodes and a topology": {"nodes": {"avoid": ["node-a"]}, "topology": "rack"},
    "avoided nodes and a type of GPUs": {"nodes": {"avoid": ["node-a"]}, "resources": {"gpu": 2, "gpu_type": "H100"}},
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
    **{f"memory {size}": {"resources": {"memory": size, "shm": size}} for size in ("512Mi", "1.5Gi", "2G", 2000000)},
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
    "type of GPUs and a rack": {"resources": {"gpu": "A100:1"}, "topology": "rack"},
    "limits beside requests": {"resources": {"cpu": 2, "cpu_limit": 4, "memory": "4Gi", "memory_limit": "8Gi"}},
    "everything": {
        "target": "jobset",
        "replicas": 3,
        "resources": {"cpu": 2, "memory": "8Gi", "gpu": 2, "shm": "1Gi", "extended": {"rdma/hca": 1}},
        "deadline": "2h",
        "ttl": "7d",
        "checkpoint": "ckpt:/ckpt",
        "volumes": ["data:/data"],
        "env": {"A": "$(B)"},
        "secrets": {"KEY": "secret:key"},
        "nodes": {"selector": {"pool": "gpu"}, "tolerations": ["gpu:NoSchedule"]},
        "pods": {"labels": {"team": "a"}, "annotations": {"b": "c"}, "pull_secrets": ["p"], "service_account": "s"},
        "topology": "topology.kubernetes.io/rack:preferred",
    },
    "gang of one pod": {"gang": "native"},
    "native gang in one rack": {"gang": "native", "replicas": 2, "topology": "topology.kubernetes.io/rack"},
    "native gang near": {"gang": "native", "replicas": 2, "topology": "topology.kubernetes.io/rack:preferred"},
    "gang of Volcano with a priority": {"gang": "volcano", "replicas": 2, "pods": {"priority_class": "high"}},
    "native gang with a priority": {"gang": "native", "replicas": 2, "pods": {"priority_class": "high"}},
    "gang without a priority": {"gang": "coscheduling", "replicas": 2, "pods": {"priority_class": "high"}},
    "patch of a TrainJob": {
        "target": "trainjob",
        "patch": {"spec": {"affinity": {"nodeAffinity": {}}, "containers": [{"name": "node", "env": [{"name": "X"}]}]}},
    },
    "own domain of a Job's pods": {"target": "job", "patch": {"spec": {"subdomain": "mine"}}},
    **{f"fabric {name}": {"fabric": name, "resources": {"gpu": 8, "memory": "64Gi"}} for name in fabrics()},
}


def packed(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Jobs that have the fields of all cases, as few as flk accepts: Helm takes as long for each as flk for ten."""
    names: list[list[str]] = []
    jobs: list[dict[str, Any]] = []
    for name, fields in cases.items():
        for number, job in enumerate(jobs):
            both = united(job, fields)
            if both is not None and (both == job or is_rendered(both)):
                names[number].append(name)
                jobs[number] = both
                break
        else:
            names.append([name])
            jobs.append(fields)
    return {f"{group[0]} ({len(group)})": job for group, job in zip(names, jobs, strict=True)}


# Which jobs flk refuses takes a second and a half to find out, which one process of pytest does, and none to collect.
in_one_process = pytest.mark.xdist_group("chart")


@pytest.fixture(scope="module")
def refused() -> dict[str, dict[str, Any]]:
    """Those of all jobs that flk refuses, by their names."""
    return {name: fields for name, fields in (JOBS | OPTIONS | pairs()).items() if not is_rendered(fields)}


@pytest.fixture(scope="module")
def allowed(refused: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """JOBS, and the jobs that have the options and the pairs that flk accepts."""
    others = {name: fields for name, fields in (OPTIONS | pairs()).items() if name not in refused}
    return JOBS | packed(others)


@pytest.fixture(scope="module")
def charts(allowed: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What the chart renders for all jobs, by their names. Starting Helm for each would take a minute."""
    return templates({name: {"job": {"enabled": True, **fields}} for name, fields in allowed.items()})


@in_one_process
@pytest.mark.parametrize("name", JOBS)
def test_chart_renders_what_flk_renders(name: str, charts: dict[str, list[dict[str, Any]]]) -> None:
    assert of_chart(charts[name]) == rendered(job_of(JOBS[name]))


@in_one_process
def test_chart_renders_what_flk_renders_of_all_options_and_pairs(
    allowed: dict[str, dict[str, Any]], charts: dict[str, list[dict[str, Any]]]
) -> None:
    packed_jobs = allowed.keys() - JOBS.keys()
    assert len(packed_jobs) > 20
    for name in packed_jobs:
        assert of_chart(charts[name]) == rendered(job_of(allowed[name])), name


@in_one_process
def test_chart_refuses_what_flk_refuses(refused: dict[str, dict[str, Any]]) -> None:
    assert len(refused) > 10
    assert [name for name, fields in refused.items() if template({"job": {"enabled": True, **fields}}).code == 0] == []


@pytest.mark.parametrize("empty", [None, ""])
def test_an_empty_value_is_the_default_of_the_option(empty: str | None) -> None:
    # Helm drops null from the values, the chart's default with it, before it checks them.
    found = SCHEMA["properties"]["job"]["properties"]
    names = [
        name
        for name in Job.model_fields.keys() & found.keys()
        if empty is None or {"enum": ["", None]} in found[name].get("anyOf", [])
    ]
    values = {**dict.fromkeys(names, empty), "pods": {"labels": empty, "pull_secrets": empty}, "command": COMMAND}
    chart = template({"job": {"enabled": True, **values}})
    assert {"name", "fabric", "hang_timeout", "resources"} <= {*names}
    assert of_chart(chart.documents) == rendered(job_of({"pods": {}}))


def test_every_option_is_compared_or_says_why_the_chart_lacks_it() -> None:
    table = {".".join(row.path): row.option for row in rows(Job)}
    parts = {path.rpartition(".")[0] for path in table}
    lacking = {path for path, option in table.items() if option.not_in_chart}
    assert SAMPLES.keys() == {"command", *table.keys()} - parts - lacking
    for path, values in SAMPLES.items():
        for value in values:
            assert job_of(with_value(path, value)) != job_of(NEEDED.get(path, {})), f"{path}: {value} is the default"


REFUSED: dict[str, dict[str, Any]] = {
    "priority of a TrainJob": {"pods": {"priority_class": "high"}},
    "gang of a TrainJob": {"gang": "volcano", "replicas": 2},
    "host network of a TrainJob": {"patch": {"spec": {"hostNetwork": True}}},
    "sidecar of a TrainJob": {"patch": {"spec": {"containers": [{"name": "sidecar", "image": "x"}]}}},
    "a volume of a TrainJob at two paths": {"volumes": ["data:/data", "data:/again"]},
    "pull policy of a TrainJob": {"image_pull_policy": "Always"},
    "probe of a TrainJob": {"patch": {"spec": {"containers": [{"name": "node", "livenessProbe": {}}]}}},
}


@pytest.mark.parametrize("values", REFUSED.values(), ids=REFUSED.keys())
def test_chart_refuses_what_a_train_job_cannot_set_in_the_words_of_flk(values: dict[str, Any]) -> None:
    chart = template({"job": {"enabled": True, "target": "trainjob", **values}})
    with pytest.raises(UsageError) as refused:
        rendered(validated({"command": COMMAND, "name": "gpt", "target": "trainjob", **values}))
    assert chart.code != 0
    assert str(refused.value).removeprefix("target: ") in chart.stderr


@pytest.mark.parametrize(
    ("served", "used"),
    [
        (["scheduling.k8s.io/v1alpha2/PodGroup"], "v1alpha2"),
        (["scheduling.k8s.io/v1alpha3/PodGroup", "scheduling.k8s.io/v1beta1/PodGroup"], "v1beta1"),
        ([], "v1beta1"),
    ],
)
def test_the_pod_group_has_the_version_that_the_cluster_serves(served: list[str], used: str) -> None:
    job = {"enabled": True, "gang": "native" if not served else "auto", "replicas": 2, "target": "job"}
    found = template({"job": job}, *[f"--api-versions={each}" for each in served]).one("PodGroup")
    assert found["apiVersion"] == f"scheduling.k8s.io/{used}"


@pytest.mark.parametrize(("fields", "said"), [case for case in FORBIDDEN if "diloco" not in case[0]])
def test_chart_refuses_forbidden_volumes_in_the_words_of_flk(fields: dict[str, Any], said: str) -> None:
    forbidden = {"forbidden_volumes": ["claim", "nfs", "secret", "configmap", "hostpath"]}
    chart = template({"job": {"enabled": True, "replicas": 2, **fields}, "defaults": forbidden})
    assert f"job.{said.format('the defaults of this namespace forbid volumes of kind')}" in chart.stderr
    assert template({"job": {"enabled": True, "replicas": 2, **fields}}).code == 0


def test_chart_refuses_gpus_and_sinks_in_the_words_of_flk() -> None:
    unknown = {"job": {"enabled": True, "resources": {"gpu": "X9:1"}}}
    sink = {"job": {"enabled": True, "metrics": "tensorboard:curves"}}
    assert "metrics" in template(sink).stderr
    twice = {"job": {"enabled": True, "metrics": "wandb,mlflow,wandb"}}
    assert "job.metrics: names wandb twice" in template(twice).stderr
    without = {"job": {"enabled": True, "resources": {"gpu_type": "H100"}}}
    assert "flk knows no GPUs of type X9, only A10, A100" in template(unknown).stderr
    memory = {"job": {"enabled": True, "checkpoint": "data:/ckpt", "memory_path": "/ckpt/flk"}}
    assert "job.memory_path: /ckpt/flk is on the volume data:/ckpt, which is no local disk" in template(memory).stderr
    assert "gpu_type: needs a number of GPUs: H100:1" in template(without).stderr


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
    assert of_chart(chart.documents) == rendered(job)


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
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
