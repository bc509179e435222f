"""The kinds of objects that a job can become: their manifests, the meaning of their status, and their pods."""

from __future__ import annotations

import copy
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk.errors import UsageError
from flk.health import find
from flk.jobs.state import Phase, derive
from flk.manifest import make_bundle, render
from flk.observe.model import PodPhase
from flk.observe.observation import Observation
from flk.observe.view import JobView
from flk.spec import labels
from flk.spec.job import Job, validated
from flk.targets import TARGETS, target_of
from flk.targets.indexed import job_spec
from flk.targets.rendezvous import needs_secret
from flk.targets.trainjob import NODE, RUNTIME, runtime_template
from tests.support.api_server import PODS
from tests.support.jobs import MADE, NOW, JobBuilder

K8S = Path(__file__).parents[4] / "k8s"
OTHERS = ("trainjob", "jobset", "job")
INDEX = "batch.kubernetes.io/job-completion-index"


def job(target: str, **fields: Any) -> Job:
    return validated({"command": "train.py", "name": "gpt", "replicas": 3, "ship": False, "target": target, **fields})


def manifests(target: str, **fields: Any) -> list[dict[str, Any]]:
    made = job(target, **fields)
    return render(made, make_bundle(made, Path()), namespace="team")


def stored(target: str, **status: Any) -> dict[str, Any]:
    """The object of a job as the API server has it."""
    found = copy.deepcopy(manifests(target)[0])
    found["metadata"] |= {"uid": "uid-gpt", "creationTimestamp": MADE}
    return found | {"status": status}


JOBSET = "jobset.sigs.k8s.io/jobset-name"
# The Jobs whose controller makes the pods of the job gpt.
JOBS_OF = {"job": "gpt", "jobset": "gpt-worker-0", "trainjob": "gpt-node-0"}


def pod(target: str, index: int, *, made: str = MADE, suffix: str = "abcde", **status: Any) -> dict[str, Any]:
    kind = TARGETS[target]
    names = {INDEX: str(index), "flk.dev/job": "gpt", JOBSET: "gpt"}
    names |= {"jobset.sigs.k8s.io/jobset-uid": "uid-gpt"}
    return {
        "metadata": {
            "name": f"{kind.pod_name('gpt', 'Worker', index)}-{suffix}",
            "uid": f"{index}{suffix}",
            "namespace": "team",
            "creationTimestamp": made,
            "labels": names,
            "ownerReferences": [{"kind": "Job", "name": JOBS_OF[target], "uid": "uid-gpt", "controller": True}],
        },
        "spec": {"nodeName": "node-a", "containers": [{"name": kind.container}], "restartPolicy": "Never"},
        "status": {"phase": "Running", **status},
    }


def ended(kind: str, code: int) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "finishedAt": MADE}}
    return {"phase": "Failed", "containerStatuses": [{"name": kind, "state": state}]}


@pytest.mark.promise("Clusters: The same job trains as a PyTorchJob, a TrainJob, a JobSet and a Job")
@pytest.mark.parametrize("target", OTHERS)
def test_the_same_pods(target: str) -> None:
    """The containers of all targets are those of the PyTorchJob, but for their name and how they find each other."""
    (expected,) = TARGETS["pytorchjob"].replicas(manifests("pytorchjob", topology="rack")[0]).values()
    (found,) = TARGETS[target].replicas(manifests(target, topology="rack")[0]).values()
    assert found.count == expected.count == 3
    own = copy.deepcopy(found.template)["spec"]
    for key in ("restartPolicy", "subdomain"):
        own.pop(key, None)
    want = expected.template["spec"]
    assert own.keys() == want.keys()
    container, reference = own.pop("containers")[0], dict(want)["containers"][0]
    assert own == {k: v for k, v in want.items() if k != "containers"}
    differing = {key for key in reference if container.get(key) != reference[key]}
    assert differing <= {"name", "env", "ports"}
    variables = {v["name"]: v for v in container["env"]}
    changed = {v["name"] for v in reference["env"] if variables[v["name"]] != v}
    assert changed == {"FLK_POD_INDEX", "FLK_RDZV_ENDPOINT"}


@pytest.mark.promise("Clusters: The same job trains as a PyTorchJob, a TrainJob, a JobSet and a Job")
@pytest.mark.parametrize("target", OTHERS)
def test_conditions_mean_the_same(target: str) -> None:
    success = {"trainjob": "Complete", "jobset": "Completed", "job": "Complete"}[target]
    for kind, phase in ((success, Phase.SUCCEEDED), ("Failed", Phase.FAILED)):
        found = stored(target, conditions=[{"type": kind, "status": "True", "lastTransitionTime": MADE}])
        assert derive(JobView(Observation(found, [], NOW))).phase == phase
    suspended = stored(target)
    suspended["spec"] |= TARGETS[target].suspension(True)["spec"]
    assert derive(JobView(Observation(suspended, [], NOW))).phase == Phase.SUSPENDED


@pytest.mark.parametrize("target", OTHERS)
def test_evidence_names_the_container_of_the_kind(target: str) -> None:
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    last = {"terminated": {"exitCode": 1, "finishedAt": MADE}}
    container = {"name": TARGETS[target].container, "state": state, "lastState": last, "restartCount": 3}
    pods = [pod(target, 0), pod(target, 1, containerStatuses=[container]), pod(target, 2)]
    (cause,) = find(JobView(Observation(stored(target), pods, NOW)))
    (named,) = {item.field.partition("[")[2].partition("]")[0] for item in cause.evidence}
    assert (cause.code, named) == ("CrashLoop", TARGETS[target].container)


def test_kueues_patches_of_a_trainjob_are_not_created_again() -> None:
    found = stored("trainjob")
    own = found["spec"]["runtimePatches"]
    patches = [*own, {"manager": "kueue.x-k8s.io/manager", "time": MADE, "trainingRuntimeSpec": {}}]
    again = TARGETS["trainjob"].recreatable(found | {"spec": found["spec"] | {"runtimePatches": patches}})
    assert again["spec"]["runtimePatches"] == own


@pytest.mark.parametrize("target", OTHERS)
def test_a_pod_that_comes_back_replaces_the_one_that_ended(target: str) -> None:
    kind = TARGETS[target]
    old = pod(target, 1, suffix="aaaaa", **ended(kind.container, 143))
    pods = [pod(target, 0), pod(target, 2), old]
    found = stored(target, active=2)
    waiting = JobView(Observation(found, pods, NOW))
    assert not waiting.failed
    new = pod(target, 1, suffix="bbbbb", made="2026-01-01T00:00:20Z")
    view = JobView(Observation(found, [new, *pods], NOW))
    assert [p.name for p in view.pods] == [f"{kind.pod_name('gpt', 'Worker', i)}-{s}" for i, s in enumerate(["abcde", "bbbbb", "abcde"])]  # noqa: E501  # fmt: skip
    assert [p.phase for p in view.pods] == [PodPhase.RUNNING] * 3
    assert list(view.replaced_pods) == [old["metadata"]["name"]]
    assert view.began


@pytest.mark.parametrize("ends", [True, False])
def test_a_trainjob_goes_before_its_pods_whose_end_is_waited_for(fake: Any, run: Any, ends: bool) -> None:
    """Trainer makes the JobSet of a TrainJob anew as long as the TrainJob exists, even while it is being deleted."""
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
    fake.objects[path], fake.watches[path] = {}, deque()
    fake.add("trainjobs", manifests("trainjob")[0])
    left = fake.add("pods", pod("trainjob", 0))
    if ends:
        change = json.dumps({"type": "DELETED", "object": left}).encode()
        fake.watches[PODS].append([change + b"\n"])
    code, stdout, stderr = run("delete", "gpt", "--timeout", "1s")
    (deletion,) = [request for request in fake.requests if request.method == "DELETE"]
    assert deletion.body["propagationPolicy"] == "Background"
    assert (code, stdout) == ((0, "gpt\n") if ends else (124, "")), stderr
    assert ("1 pod left" in stderr) is not ends


def test_scale_refuses_a_jobset_before_it_changes_anything(fake: Any, run: Any) -> None:
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
    fake.objects[path] = {}
    fake.add("jobsets", manifests("jobset", elastic="1:3")[0])
    code, _, stderr = run("scale", "gpt", "1")
    assert code == 2
    assert "job gpt is a JobSet, which cannot change its number of pods" in stderr
    assert "submit it with --target job" in stderr
    assert not {request.method for request in fake.requests} & {"PATCH", "PUT", "DELETE"}


@pytest.mark.parametrize("target", OTHERS)
def test_an_exit_code_below_128_is_final(target: str) -> None:
    pods = [pod(target, 0), pod(target, 1, **ended(TARGETS[target].container, 100))]
    assert JobView(Observation(stored(target, active=2), pods, NOW)).failed


@pytest.mark.parametrize("target", OTHERS)
def test_pods_of_an_earlier_job_of_the_name_are_not_its_own(target: str) -> None:
    found, earlier = stored(target), pod(target, 0, made="2025-12-31T23:59:59Z")
    earlier["metadata"]["ownerReferences"][0]["uid"] = "another"
    earlier["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-uid"] = "another"
    own = pod(target, 0)
    assert target_of(found).own([earlier, own], found) == [own]


@pytest.mark.parametrize("target", [*OTHERS, "pytorchjob"])
@pytest.mark.parametrize("what", ["controller", "owner", "name", "index"])
def test_a_pod_that_only_says_that_it_is_the_jobs_own_is_not(target: str, what: str) -> None:
    """Everybody in the namespace may write labels and owners; the name of a pod that is there is taken."""
    if target == "pytorchjob":
        builder = JobBuilder(2, name="gpt").all("pod")
        found, own = builder.job, builder.pods[0]
    else:
        found, own = stored(target), pod(target, 0)
    forged = copy.deepcopy(own)
    forged["metadata"]["creationTimestamp"] = "2036-01-01T00:00:00Z"
    if what == "controller":
        del forged["metadata"]["ownerReferences"][0]["controller"]
    if what == "owner":
        forged["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "evil", "uid": "evil", "controller": True}]
    if what == "name":
        forged["metadata"]["name"] = "evil-0-abcde"
    if what == "index":
        forged["metadata"]["labels"] |= {INDEX: "1", "training.kubeflow.org/replica-index": "1"}
    assert target_of(found).own([own, forged], found) == [own]


def test_a_pod_of_a_long_name_has_a_part_of_it() -> None:
    """Jobs that flk makes have shorter names. Others' TrainJobs may not."""
    found, name = stored("trainjob"), "n" * 52
    found["metadata"]["name"] = name
    own = pod("trainjob", 12)
    own["metadata"] |= {"name": f"{name}-n-12-abcde", "labels": own["metadata"]["labels"] | {JOBSET: name}}
    own["metadata"]["ownerReferences"][0]["name"] = f"{name}-node-0"
    assert target_of(found).own([own], found) == [own]


@pytest.mark.promise("Clusters: The API server accepts what flk accepts, for every target")
def test_what_a_trainjob_cannot_set_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot set priorityClassName of its pods"):
        manifests("trainjob", pods={"priority_class": "high"})
    with pytest.raises(UsageError, match="cannot set schedulingGroup"):
        manifests("trainjob", gang="native")
    with pytest.raises(UsageError, match="--ttl: a TrainJob has no such field"):
        manifests("trainjob", ttl="1h")


@pytest.mark.parametrize("ports", [None, [], [{"containerPort": 8080}]])
def test_a_job_whose_patch_takes_its_port_away_has_a_service_for_names_all_the_same(ports: Any) -> None:
    _, service = manifests("job", patch={"spec": {"containers": [{"name": "pytorch", "ports": ports}]}})
    assert (service["spec"]["clusterIP"], service["spec"]["ports"]) == ("None", [])


def test_without_a_cluster_auto_is_a_pytorchjob_and_a_gang_must_be_named() -> None:
    assert manifests("auto")[0]["kind"] == "PyTorchJob"
    with pytest.raises(UsageError, match="asks the cluster"):
        manifests("job", gang="auto")


@pytest.mark.parametrize("gang", ["native", "volcano", "coscheduling"])
@pytest.mark.parametrize("target", ["pytorchjob", "jobset", "job"])
def test_gang(target: str, gang: str) -> None:
    found = manifests(target, gang=gang)
    (group,) = [item for item in found if item["kind"] == "PodGroup"]
    assert "3" in str(group["spec"])
    (role,) = TARGETS[target].replicas(found[0]).values()
    named = {
        "native": role.template["spec"].get("schedulingGroup"),
        "volcano": role.template["metadata"]["annotations"].get("scheduling.k8s.io/group-name"),
        "coscheduling": role.template["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group"),
    }[gang]
    assert named in ("gpt", {"podGroupName": "gpt"})
    assert "scheduling" not in str(found[0]["spec"].keys())  # with which Kubernetes would make a second group
    assert all(item["kind"] != "PodGroup" for item in manifests(target, gang=gang, replicas=1))


@pytest.mark.parametrize(
    ("topology", "constraints"), [("rack", {"topology": [{"key": "rack"}]}), ("rack:preferred", None), (None, None)]
)
def test_a_required_topology_is_a_constraint_of_a_native_group(topology: str | None, constraints: Any) -> None:
    found = manifests("job", gang="native", topology=topology)
    (group,) = [item["spec"] for item in found if item["kind"] == "PodGroup"]
    assert group.get("schedulingConstraints") == constraints
    (other,) = [item for item in manifests("job", gang="volcano", topology=topology) if item["kind"] == "PodGroup"]
    assert "schedulingConstraints" not in other["spec"]


@pytest.mark.parametrize("target", [name for name, target in TARGETS.items() if target.ends_with_first])
def test_an_elastic_job_of_one_pod_has_a_secret_before_it_grows(target: str) -> None:
    assert needs_secret(manifests(target, replicas=1, elastic="1:4")[0])
    assert not needs_secret(manifests(target, replicas=1)[0])


def test_the_runtime_in_k8s_is_the_one_that_trainjobs_need() -> None:
    runtime = yaml.safe_load((K8S / "training-runtime.yaml").read_text())
    assert (runtime["apiVersion"], runtime["kind"]) == (TARGETS["trainjob"].api_version, "ClusterTrainingRuntime")
    assert runtime["metadata"]["name"] == RUNTIME
    assert len(NODE) <= 20  # Trainer 2.4 refuses longer names of ReplicatedJobs
    assert runtime["metadata"]["labels"] == labels.MANAGED_BY
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 1}  # not torch: flk's launcher finds the other pods by itself
    spec = runtime["spec"]["template"]["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    (only,) = spec["replicatedJobs"]
    assert only["name"] == NODE
    assert only["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    # A runtime does not know the budgets of a job.
    assert only["template"]["spec"] == {**job_spec(NODE, 10_000), "template": runtime_template()}


def test_a_role_of_a_foreign_job_may_have_no_pods() -> None:
    roles = TARGETS["pytorchjob"].replicas({"spec": {"pytorchReplicaSpecs": {"Master": {}, "Worker": {"replicas": 0}}}})
    assert {role: replicas.count for role, replicas in roles.items()} == {"Master": 1, "Worker": 0}
