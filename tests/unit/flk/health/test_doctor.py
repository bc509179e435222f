"""The checks of `flk doctor` on objects as the API server has them: what each finds, and how bad it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk.cli.doctor import with_remedies
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable, is_selected
from flk.health.controllers import OPTIONAL, all_rights, rights_for
from flk.health.table import CAUSES, examine
from flk.observe.resources import POD_GROUPS, RESOURCES
from flk.spec.hardware import gpu_terms
from flk.targets import DEFAULT, TARGETS
from flk.targets.gang import GANGS
from flk.user.commands import Commands, Connection
from tests.support.api_server import JOBS
from tests.support.chart import template
from tests.support.commands import Run

ROOT = Path(__file__).parents[4]
FORBIDDEN = Unreadable("no permission")
MISSING = Unreadable("not found", missing=True)
NOT_SERVED = Unreadable("the cluster does not serve X", missing=True, remedy="install X")


def deployment(replicas: int = 1, ready: int = 1, image: str = "training-operator:v1.9.4") -> dict[str, Any]:
    return {
        "metadata": {"name": "training-operator", "namespace": "kubeflow"},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [{"image": image}]}}},
        "status": {"readyReplicas": ready},
    }


def node(
    name: str = "a", *, taints: Any = (), labels: Any = (), images: Sequence[str] = (), **allocatable: str
) -> dict[str, Any]:
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110", **allocatable}
    return {
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": amounts, "images": [{"names": [image]} for image in images]},
    }


def waiting_for(image: str) -> dict[str, Any]:
    """A pod of another job that cannot pull an image."""
    waiting = {"reason": "ErrImagePull", "message": "lookup docker.io: no such host"}
    status = {"containerStatuses": [{"image": image, "state": {"waiting": waiting}}]}
    return {"metadata": {"name": "other-0"}, "spec": {"containers": []}, "status": status}


GPUS = {"nvidia.com/gpu": "8"}
CLUSTER = Cluster(
    namespace="team",
    commands=Commands("team", Connection("fake")),
    version={"gitVersion": "v1.34.4"},
    api=RESOURCES["pytorchjob"],
    controllers={"operator": [deployment()]},
    rights=dict.fromkeys(all_rights(DEFAULT), True),
    nodes=[node("a", **GPUS), node("b", **GPUS)],
    pending=[],
    named={("serviceaccounts", "default"): {}},
    admission={},
)


def pods(count: int = 2, resources: Any = None, labels: Any = None, spec: Any = None, container: Any = None) -> Pods:
    secure = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    training = {"name": "pytorch", "securityContext": secure, "resources": resources or {}, **(container or {})}
    pod_spec = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [training],
        **(spec or {}),
    }
    worker = {"replicas": count, "template": {"spec": pod_spec}}
    metadata = {"name": "gpt", "labels": labels or {}}
    return Pods({"metadata": metadata, "spec": {"pytorchReplicaSpecs": {"Worker": worker}}})


def claim(name: str = "data") -> dict[str, Any]:
    return {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}]}


def key(secret: str = "wandb", name: str = "token") -> dict[str, Any]:
    return {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}]}


GPU = {"limits": {"nvidia.com/gpu": "4"}}
_REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": gpu_terms("H100")}}
ON_H100 = {"affinity": {"nodeAffinity": _REQUIRED}}
NO_PATCH = {**dict.fromkeys(all_rights(DEFAULT), True), ("patch", "pytorchjobs.kubeflow.org"): False}
SPOT = [{"key": "spot", "effect": "NoSchedule"}]
CONTROL_PLANE = [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]

# name of the check; what differs in the cluster; the job's pods; the level; a part of what is found
CASES: dict[str, tuple[str, dict[str, Any], Pods | None, Level, str]] = {
    "no version": ("kubernetes", {"version": FORBIDDEN}, None, Level.UNKNOWN, "no permission"),
    "old server": ("kubernetes", {"version": {"gitVersion": "v1.22.1-gke"}}, None, Level.WARNING, "1.29 or newer"),
    "no namespace": (
        "namespace",
        {"accepted": Unreadable("there is no namespace team", missing=True, remedy="list them")},
        None,
        Level.FAILED,
        "there is no namespace team",
    ),
    "namespace that is being deleted": (
        "namespace",
        {"accepted": Unreadable("configmaps is forbidden", causes=["NamespaceTerminating"])},
        None,
        Level.FAILED,
        "namespace team is being deleted, and nothing can be created in it",
    ),
    "no API": ("pytorchjobs", {"api": NOT_SERVED}, None, Level.FAILED, "does not serve X"),
    "no operator": ("operator", {"controllers": {"operator": []}}, None, Level.WARNING, "may stay without pods"),
    "operator off": (
        "operator",
        {"controllers": {"operator": [deployment(0, 0)]}},
        None,
        Level.FAILED,
        "scaled to 0 pods",
    ),
    "operator dead": (
        "operator",
        {"controllers": {"operator": [deployment(1, 0)]}},
        None,
        Level.FAILED,
        "has no pod that is ready",
    ),
    "operator that takes invalid jobs": (
        "operator",
        {"controllers": {"operator": [deployment(image="kubeflow/training-operator:v1.7.0")]}},
        None,
        Level.FAILED,
        "is old: before 1.8 it takes invalid jobs",
    ),
    "operator hidden": ("operator", {"controllers": {"operator": FORBIDDEN}}, None, Level.UNKNOWN, "not known"),
    "right": ("rights", {"rights": NO_PATCH}, None, Level.FAILED, "you may not patch pytorchjobs.kubeflow.org"),
    "image on the nodes": (
        "image",
        {"nodes": [node("a", images=["docker.io/team/torch:2"]), node("b")]},
        pods(container={"image": "team/torch:2"}),
        Level.OK,
        "docker.io/team/torch:2 is on 1 of 2 nodes; the others pull it from docker.io",
    ),
    "image by its digest": (
        "image",
        {"nodes": [node("a", images=["docker.io/team/torch@sha256:12"]), node("b")]},
        pods(container={"image": "team/torch:2@sha256:12"}),
        Level.OK,
        "docker.io/team/torch@sha256:12 is on 1 of 2 nodes",
    ),
    "image that another job's pod cannot pull": (
        "image",
        {"pending": [waiting_for("docker.io/library/torch:latest")]},
        pods(container={"image": "torch"}),
        Level.WARNING,
        "pod other-0 cannot pull docker.io/library/torch:latest: lookup docker.io: no such host",
    ),
    "images of nodes that the user may not list": (
        "image",
        {"nodes": FORBIDDEN},
        pods(container={"image": "torch"}),
        Level.UNKNOWN,
        "cannot list the nodes, which tell their images: no permission",
    ),
    "pods that the user may not create": (
        "admission",
        {"admission": None},
        pods(),
        Level.UNKNOWN,
        "was not checked: you may not create pods",
    ),
    "webhook that cannot be tried": (
        "admission",
        {"admission": Unreadable('admission webhook "policy.example.com" does not support dry run')},
        pods(),
        Level.UNKNOWN,
        'was not checked: admission webhook "policy.example.com" does not support dry run',
    ),
    "quota": (
        "admission",
        {"admission": Unreadable("exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2")},
        pods(),
        Level.WARNING,
        "refuses a pod of the job now",
    ),
    "quota that no pod fits": (
        "admission",
        {
            "admission": Unreadable(
                "exceeded quota: q, requested: limits.memory=8Gi, used: limits.memory=0, limited: limits.memory=4Gi"
            )
        },
        pods(),
        Level.FAILED,
        "the job needs 8Gi limits.memory, and quota q has 4Gi in all: it can never run",
    ),
    "queue": (
        "queue",
        {"named": {("localqueues", "gold"): MISSING}},
        pods(labels={"kueue.x-k8s.io/queue-name": "gold"}),
        Level.FAILED,
        "there is no queue gold",
    ),
    "queue that admits nothing": (
        "queue",
        {
            "named": {
                ("localqueues", "gold"): {
                    "status": {
                        "conditions": [{"type": "Active", "status": "False", "message": "ClusterQueue is stopped"}]
                    }
                }
            }
        },
        pods(labels={"kueue.x-k8s.io/queue-name": "gold"}),
        Level.FAILED,
        "ClusterQueue is stopped",
    ),
    "no gang scheduler": (
        "gang",
        {"gang": GANGS["volcano"], "gang_api": NOT_SERVED},
        None,
        Level.FAILED,
        "serve X",
    ),
    "gang": (
        "gang",
        {"gang": GANGS["volcano"], "gang_api": POD_GROUPS["scheduling.volcano.sh"]},
        None,
        Level.OK,
        "",
    ),
    "secret": (
        "secret",
        {"named": {("secrets", "wandb"): MISSING}},
        pods(container=key()),
        Level.FAILED,
        "there is no secret wandb for key token",
    ),
    "key": (
        "secret",
        {"named": {("secrets", "wandb"): {"data": {"other": "c2VjcmV0"}}}},
        pods(container=key()),
        Level.FAILED,
        "has no key token; its keys: other",
    ),
    "pull secret": (
        "secret",
        {"named": {("secrets", "registry"): MISSING}},
        pods(spec={"imagePullSecrets": [{"name": "registry"}]}),
        Level.FAILED,
        "with which the image is pulled",
    ),
    "mounted secret": (
        "secret",
        {"named": {("secrets", "keys"): MISSING}},
        pods(spec={"volumes": [{"name": "k", "secret": {"secretName": "keys"}}]}),
        Level.FAILED,
        "there is no secret keys which the pods mount",
    ),
    "claim": (
        "claim",
        {"named": {("persistentvolumeclaims", "data"): MISSING}},
        pods(spec=claim()),
        Level.FAILED,
        "there is no PersistentVolumeClaim data",
    ),
    "no GPUs": ("capacity", {"nodes": [node()]}, pods(2, GPU), Level.FAILED, "no node offers any"),
    "too large": ("capacity", {}, pods(5, GPU), Level.FAILED, "could hold 4 pods of 4 nvidia.com/gpu"),
    "fits": (
        "capacity",
        {},
        pods(2, GPU),
        Level.OK,
        "could hold 4 pods of 4 nvidia.com/gpu if they were empty, and the job has 2",
    ),
    "taint of the nodes with GPUs": (
        "capacity",
        {"nodes": [node("a"), node("b", taints=SPOT, **GPUS), node("c", taints=SPOT, **GPUS), node("d", taints=SPOT)]},
        pods(2, GPU),
        Level.FAILED,
        "and the job has 2; 2 other nodes could hold some, but do not accept them: taint spot:NoSchedule",
    ),
    "taint": (
        "capacity",
        {"nodes": [node("a", taints=SPOT)]},
        pods(1),
        Level.FAILED,
        "taint spot:NoSchedule",
    ),
    **{
        f"toleration {toleration}": (
            "capacity",
            {"nodes": [node("a", taints=[{"key": "spot", "value": "yes", "effect": "NoSchedule"}])]},
            pods(1, spec={"tolerations": [toleration]}),
            level,
            found,
        )
        for toleration, level, found in (
            ({"operator": "Exists"}, Level.OK, "the job has 1"),
            ({"key": "spot", "operator": "Exists"}, Level.OK, "the job has 1"),
            ({"key": "spot", "operator": "Exists", "effect": "NoSchedule"}, Level.OK, "the job has 1"),
            ({"key": "spot", "value": "yes"}, Level.OK, "the job has 1"),
            ({"key": "spot", "value": "no"}, Level.FAILED, "taint spot=yes:NoSchedule"),
            ({"key": "spot"}, Level.FAILED, "taint spot=yes:NoSchedule"),
            ({"key": "other", "operator": "Exists"}, Level.FAILED, "taint spot=yes:NoSchedule"),
            ({"key": "spot", "operator": "Exists", "effect": "NoExecute"}, Level.FAILED, "taint spot=yes:NoSchedule"),
        )
    },
    "the only node is avoided": (
        "capacity",
        {"nodes": [node("a")]},
        pods(
            1,
            spec={
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["a"]}]}
                            ]
                        }
                    }
                }
            },
        ),
        Level.FAILED,
        "no node matches the required node affinity: metadata.name NotIn a",
    ),
    "selector": ("capacity", {}, pods(1, spec={"nodeSelector": {"pool": "h100"}}), Level.FAILED, "labels pool=h100"),
    "type of GPUs that no node has": (
        "capacity",
        {"nodes": [node("a", labels={"nvidia.com/gpu.product": "Tesla-T4"}, **{"nvidia.com/gpu": "8"})]},
        pods(1, spec=ON_H100),
        Level.FAILED,
        "nvidia.com/gpu.product In NVIDIA-H100-80GB-HBM3, NVIDIA-H100-NVL, NVIDIA-H100-PCIe",
    ),
    "type of GPUs": (
        "capacity",
        {"nodes": [node("a", labels={"karpenter.k8s.aws/instance-gpu-name": "h100"}, **{"nvidia.com/gpu": "8"})]},
        pods(1, spec=ON_H100),
        Level.OK,
        "the job has 1",
    ),
    "nodes that the user may not read": ("capacity", {"nodes": FORBIDDEN}, pods(1), Level.UNKNOWN, "cannot be read"),
    "GPUs": ("gpus", {}, None, Level.OK, "16 nvidia.com/gpu"),
    "admission": (
        "admission",
        {"admission": Unreadable("admission webhook policy: no latest tags")},
        pods(1),
        Level.FAILED,
        "no latest tags",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_check(case: str) -> None:
    check, differs, job, level, found = CASES[case]
    results = [r for r in examine(replace(CLUSTER, **differs), job) if r.check == check]
    assert level in {r.level for r in results}, results
    assert any(found in r.found and r.level is level for r in results), results
    for result in results:
        if result.level is Level.FAILED:
            assert result.remedy


def test_nothing_is_wrong_with_a_small_job() -> None:
    results = examine(CLUSTER, pods(2, GPU))
    assert {result.level for result in results} == {Level.OK}, results


def test_images_are_not_counted_where_no_node_is_allowed() -> None:
    results = examine(CLUSTER, pods(2, GPU, spec={"nodeSelector": {"pool": "none"}}))
    assert "image" not in {result.check for result in results}
    assert "capacity" in {result.check for result in results if result.level is Level.FAILED}


def test_where_nothing_can_be_created_a_job_is_not_checked() -> None:
    """Such a namespace lacks all that the job names."""
    gone = Unreadable("there is no namespace team", missing=True, remedy="list them")
    results = examine(replace(CLUSTER, accepted=gone, nodes=[node()]), pods(2, GPU))
    assert [r.check for r in results if r.level is Level.FAILED] == ["namespace"]
    results = examine(replace(CLUSTER, accepted=FORBIDDEN, nodes=[node()]), pods(2, GPU))
    assert [r.check for r in results if r.level is Level.FAILED] == ["capacity"]


def test_what_a_check_finds_has_the_code_of_the_cause_that_the_job_would_have() -> None:
    known = {cause.code for cause in CAUSES}
    for name, (check, differs, job, *_) in CASES.items():
        for result in examine(replace(CLUSTER, **differs), job):
            assert result.code in {"", *known}, name
            if (result.check, result.level) == (check, Level.FAILED) and job is not None:
                assert result.code, name


def granted(rules: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """The verbs and resources that the rules of a Role give."""
    return {
        (verb, re.sub("(?=/|$)", f".{group}", resource, count=1) if group else resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.promise("Clusters: The roles give what the commands need, and no more")
@pytest.mark.parametrize("gang", [None, *GANGS])
@pytest.mark.parametrize("target", TARGETS)
def test_the_role_of_the_chart_gives_the_rights_of_each_target_and_no_others(target: str, gang: str | None) -> None:
    needed = rights_for(TARGETS[target], GANGS[gang] if gang else None)
    role = template({"rbac": {"targets": [target], "gangs": [gang] if gang else []}}).one("Role")
    assert granted(role["rules"]) == {right for rights in needed.values() for right in rights}


def test_the_chart_gives_optional_rights_where_its_values_ask_for_them() -> None:
    less, more = (granted(template({"rbac": {"exec": exec_}}).one("Role")["rules"]) for exec_ in (False, True))
    assert more - less == {right for rights in OPTIONAL.values() for right in rights}


TRAINER = {"target": TARGETS["trainjob"], "api": RESOURCES["trainjob"], "runtime": {}}
RUNNING_TRAINER = {"trainer": [deployment(image="trainer:v2.3.0")], "jobset controller": [deployment()]}


@pytest.mark.parametrize(
    ("facts", "check", "level", "found"),
    [
        (TRAINER, "trainjobs", Level.OK, "jobs become TrainJobs (trainer.kubeflow.org/v1alpha1) here"),
        (TRAINER | {"api": NOT_SERVED}, "trainjobs", Level.FAILED, "does not serve X"),
        (TRAINER, "trainer", Level.OK, "Kubeflow Trainer (trainer:v2.3.0) in namespace kubeflow runs"),
        (TRAINER, "runtime", Level.OK, "is there"),
        (TRAINER | {"runtime": MISSING}, "runtime", Level.FAILED, "there is no ClusterTrainingRuntime flk"),
        (TRAINER | {"runtime": FORBIDDEN}, "runtime", Level.UNKNOWN, "no permission"),
        (
            TRAINER | {"controllers": {**RUNNING_TRAINER, "jobset controller": [deployment(1, 0)]}},
            "jobset controller",
            Level.FAILED,
            "has no pod that is ready",
        ),
        (TRAINER, "rights", Level.FAILED, "you may not create trainjobs.trainer.kubeflow.org"),
        (
            {"target": TARGETS["jobset"], "api": NOT_SERVED, "controllers": {"jobset controller": []}},
            "jobsets",
            Level.FAILED,
            "does not serve X",
        ),
        (
            {"target": TARGETS["job"], "api": RESOURCES["job"], "controllers": {}},
            "jobs",
            Level.OK,
            "jobs become Jobs (batch/v1) here",
        ),
        (
            {"target": TARGETS["job"], "api": RESOURCES["job"], "controllers": {}},
            "rights",
            Level.FAILED,
            "you may not create jobs.batch and services in namespace team, which flk submit and flk restart need",
        ),
        ({"target": TARGETS["jobset"], "gang": GANGS["volcano"]}, "rights", Level.FAILED, " and podgroups.scheduling."),
    ],
)
def test_what_a_job_needs_depends_on_its_target(facts: dict[str, Any], check: str, level: Level, found: str) -> None:
    results = examine(replace(CLUSTER, **{"controllers": RUNNING_TRAINER, **facts}), None)
    assert any((r.check, r.level) == (check, level) and found in r.found for r in results), results
    assert not any(r.check == "operator" for r in results)
    assert all(r.remedy for r in results if r.level is Level.FAILED)


def test_a_control_plane_is_no_node_that_a_job_could_have() -> None:
    nodes = [node("a", **GPUS), node("b", taints=CONTROL_PLANE, **GPUS)]
    (found,) = [r.found for r in examine(replace(CLUSTER, nodes=nodes), pods(3, GPU)) if r.check == "capacity"]
    assert found == "1 node could hold 2 pods of 4 nvidia.com/gpu if they were empty, and the job has 3"


def test_doctor_on_a_cluster_without_the_operator(fake: Any, run: Run, tmp_path: Path) -> None:
    """A job that leaves its target to the cluster becomes a Job there; a PyTorchJob needs the operator."""
    fake.documents["/version"] = {"gitVersion": "v1.34.4"}
    del fake.objects[JOBS]
    fake.objects["/apis/batch/v1/jobs"] = {}
    _, stdout, _ = run("doctor")
    assert ["ok", "jobs"] in [line.split()[:2] for line in stdout.splitlines()]
    (tmp_path / "train.py").touch()
    (tmp_path / "flk.yaml").write_text("{command: train.py, target: pytorchjob}")
    code, stdout, _ = run("doctor")
    assert code == 104
    assert any(line.split()[:2] == ["failed", "pytorchjobs"] for line in stdout.splitlines())
    assert "remedy: install Kubeflow's training operator" in stdout


def test_doctor_checks_the_gang_scheduler_of_the_job_file(fake: Any, run: Run, tmp_path: Path) -> None:
    fake.documents["/version"] = {"gitVersion": "v1.34.4"}
    (tmp_path / "train.py").touch()
    (tmp_path / "flk.yaml").write_text("{command: train.py, gang: volcano, replicas: 2}")
    _, stdout, _ = run("doctor")
    assert ["failed", "gang"] in [line.split()[:2] for line in stdout.splitlines()]


@pytest.mark.promise("Causes: flk doctor says what keeps a job from running before it exists")
@pytest.mark.parametrize(("target", "used"), [("jobset", "jobset"), ("job", "job"), ("auto", "jobset"), ("", "jobset")])
def test_doctor_checks_the_target_of_the_job_file(
    fake: Any, run: Run, tmp_path: Path, target: str | None, used: str
) -> None:
    fake.documents["/version"] = {"gitVersion": "v1.34.4"}
    del fake.objects[JOBS]
    fake.objects |= {f"/apis/{each}": {} for each in ("batch/v1/jobs", "jobset.x-k8s.io/v1alpha2/jobsets")}
    (tmp_path / "train.py").touch()
    (tmp_path / "flk.yaml").write_text("command: train.py\n" + (f"target: {target}\n" if target else ""))
    _, stdout, stderr = run("doctor")
    rows = [line.split()[:2] for line in stdout.splitlines()]
    assert ["ok", f"{used}s"] in rows, stdout + stderr
    assert not [row for row in rows if row[1:] in (["pytorchjobs"], ["operator"])]
    asked = [
        request.body["spec"]["resourceAttributes"]
        for request in fake.requests
        if request.method == "POST" and request.path.endswith("selfsubjectaccessreviews")
    ]
    assert {each["group"] for each in asked if each["resource"] == f"{used}s"} == {TARGETS[used].group}
    assert not [each for each in asked if each["resource"] == "pytorchjobs"]


def test_secrets_are_never_shown(fake: Any, run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "flk.yaml").write_text("{command: train.py, secrets: {X: wandb:token}}")
    fake.add("secrets", {"metadata": {"name": "wandb"}, "data": {"another": "Y2FuYXJ5LXZhbHVl"}})
    for words in (["doctor"], ["doctor", "-o", "json"], ["submit", "--dry-run", "--name", "gpt"]):
        code, stdout, stderr = run(*words)
        assert code == 104, stderr
        assert "secret wandb has no key token; its keys: another" in stdout + stderr
        assert "Y2FuYXJ5" not in stdout + stderr


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "zone", "operator": "In", "values": ["b"]}, False),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "pool", "operator": "NotIn", "values": ["a"]}, True),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "pool", "operator": "Exists"}, False),
        ({"key": "pool", "operator": "DoesNotExist"}, True),
        ({"key": "zone", "operator": "DoesNotExist"}, False),
        ({"key": "cores", "operator": "Gt", "values": ["3"]}, True),  # flk does not compare: the scheduler does
    ],
)
def test_a_node_affinity_is_read_as_the_scheduler_does(expression: dict[str, Any], selected: bool) -> None:
    terms = [
        {"matchExpressions": [expression, {"key": "os", "operator": "Exists"}]},
        {"matchExpressions": [{"key": "never", "operator": "Exists"}]},
    ]
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = {"affinity": {"nodeAffinity": affinity}}
    assert is_selected(node(labels={"zone": "a", "os": "linux"}), spec) == selected


def test_a_remedy_of_several_results_is_told_once() -> None:
    results = [Result("rights", Level.FAILED, each, "ask") for each in ("get", "list")]
    results.append(Result("image", Level.WARNING, "large", ""))
    assert [remedy for _, remedy in with_remedies(results)] == ["", "ask", ""]
