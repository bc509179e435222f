"""Containers that are killed, or crash, before a launcher could record an attempt: no record tells of them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from flk.health import find
from flk.jobs.state import Phase
from flk.jobs.state import derive as derive_state
from flk.observe.needs import needs
from flk.observe.observation import Need, Observation, What
from flk.observe.view import JobView
from tests.support.jobs import MADE, NOW, JobBuilder

POD = "gpt-worker-1"


def killed_by_operator(times: int, reason: str, code: int) -> JobBuilder:
    """A PyTorchJob whose pod 1 ended: the operator has deleted it each time, so that only events are left."""
    job = JobBuilder(memory="1Gi").all("pod").condition("Restarting").ran(1, *"abcdef"[:times], "pod-1")
    for _ in range(times):
        job.event(reason, f"Error pod {POD} container pytorch exitCode: {code} terminated message: ")
    return job.event("ExitedWithCode", f"Pod: team.{POD} exited with code {code}", count=times)


def killed_in_job(times: int, reason: str, code: int, **status: Any) -> JobView:
    """A Job of Kubernetes, which keeps the pods that have ended; the present one runs."""
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "gpt", "namespace": "team", "uid": "u", "creationTimestamp": MADE},
        "spec": {
            "completions": 1,
            "podFailurePolicy": {},
            "template": {"metadata": {"labels": {"flk.dev/job": "gpt"}}, "spec": {}},
        },
    }
    job["metadata"]["labels"] = {"flk.dev/job": "gpt"}
    running = JobBuilder(1, memory="1Gi").pod(0).pods[0]
    ended = JobBuilder(1, memory="1Gi").ended(0, code, reason=reason, **status).pods[0]
    pods = []
    for number, pod in enumerate([*[ended] * times, running]):
        pod = deepcopy(pod)
        labels = {"batch.kubernetes.io/job-completion-index": "0", "flk.dev/job": "gpt"}
        pod["metadata"] |= {"name": f"gpt-0-{number}", "uid": f"{number}", "labels": labels}
        pod["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{number:02}Z"
        pods.append(pod)
    return JobView(Observation(job, pods, NOW + 500))


def view_of(target: str, times: int, reason: str, code: int) -> JobView:
    if target == "job":
        return killed_in_job(times, reason, code)
    view = killed_by_operator(times, reason, code).view()
    view.now = NOW + 500
    return view


@pytest.mark.parametrize("target", ["pytorchjob", "job"])
@pytest.mark.parametrize("reason", ["OOMKilled", "Error"])  # containerd does not always hear of the kernel's kill
def test_a_container_that_is_killed_at_its_memory_limit_before_an_attempt_is_named(target: str, reason: str) -> None:
    once, twice, often = (view_of(target, times, reason, 137) for times in (1, 2, 3))
    for view in (once, twice):
        (cause,) = find(view)
        assert (cause.code, cause.is_stuck(view.now)) == ("OutOfMemory", False)
        assert "memory limit of 1Gi" in cause.sentence
    state = derive_state(often)
    assert (state.phase, state.reason, state.code) == (Phase.STUCK, "OutOfMemory", 104)
    assert "3 times" in state.message


@pytest.mark.parametrize("target", ["pytorchjob", "job"])
def test_a_container_that_crashes_again_and_again_before_an_attempt_is_a_loop(target: str) -> None:
    assert find(view_of(target, 2, "Error", 139)) == []
    (cause,) = find(view_of(target, 3, "Error", 139))
    assert (cause.code, cause.exit_code) == ("CrashLoop", 100)
    assert "exit code 139" in cause.sentence
    assert "3 times" in cause.sentence


@pytest.mark.parametrize(("reason", "code"), [("OOMKilled", 137), ("Error", 139)])
def test_a_new_pod_0_has_time_to_hear_of_the_attempts_that_others_know(reason: str, code: int) -> None:
    """Its record is gone with its earlier pod, and the launchers of the other pods have it."""
    job = killed_by_operator(4, reason, code)
    for number, event in enumerate(job.events):
        event["lastTimestamp"] = f"2026-01-01T00:0{number}:00Z"
    view = job.view()
    cause = find(view)[0]
    third = cause.since
    assert [cause.is_stuck(third + seconds) for seconds in (-100, 59, 61)] == [False, False, True]
    assert third == max(end for _, end in sorted(view.recreations[POD].lives)[:3])


def test_a_loop_is_stuck_although_each_end_is_recent() -> None:
    """Ends that follow each other within the time of grace do not begin it anew."""
    job = JobBuilder().all("pod").condition("Restarting").ran(1, *"abc", "pod-1")
    for number, event in enumerate(job.events):
        event["lastTimestamp"] = f"2026-01-01T00:00:{15 * number:02}Z"
    job.event("ExitedWithCode", f"Pod: team.{POD} exited with code 139", at="2026-01-01T00:00:58Z", count=3)
    view = job.view()
    view.now = NOW + 60
    state = derive_state(view)
    assert (state.phase, state.reason) == (Phase.STUCK, "CrashLoop")


def test_pods_that_were_evicted_and_containers_that_ran_for_long_are_in_no_loop() -> None:
    evicted = {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]}
    assert not {f.code for f in find(killed_in_job(3, "Error", 137, **evicted))} & {"OutOfMemory", "CrashLoop"}
    view = view_of("job", 3, "OOMKilled", 137)
    view.now += 1200
    assert find(view) == []


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"reason": "ImagePullBackOff", "message": "img: not found"}, "ImageNotFound"),
        ({"reason": "CrashLoopBackOff", "message": "back-off"}, "CrashLoop"),
    ],
)
@pytest.mark.parametrize("said", ['configmap "data" not found', "mount failed: exit status 32"])
def test_a_failure_of_an_earlier_mount_says_nothing_of_a_container_that_waits_for_more(
    state: dict[str, str], code: str, said: str
) -> None:
    job = JobBuilder(1).pod(0, "Pending", {"waiting": state}).event("FailedMount", said, "Pod", "gpt-worker-0")
    assert [cause.code for cause in find(job.view())] == [code]


def test_a_cause_that_passes_hides_no_lasting_one_of_another_pod() -> None:
    busy = {"waiting": {"reason": "ErrImagePull", "message": "429 Too Many Requests"}}
    root = {"waiting": {"reason": "CreateContainerConfigError", "message": "image will run as root"}}
    job = JobBuilder(2).pod(0, "Pending", busy).pod(1, "Pending", root)
    assert [cause.code for cause in find(job.view())] == ["ContainerStartFailed", "RegistryBusy"]


def test_a_mount_that_fails_for_a_missing_object_is_told_once() -> None:
    job = JobBuilder(1).pod(0, "Pending", {}).event("FailedMount", 'secret "keys" not found', "Pod", "gpt-worker-0")
    assert [cause.code for cause in find(job.view())] == ["ReferenceMissing"]
    other = {"waiting": {"reason": "ErrImagePull", "message": "no match for platform in manifest"}}
    assert [cause.code for cause in find(JobBuilder(1).pod(0, "Pending", other).view())] == ["WrongArchitecture"]


WAITING = {"waiting": {"reason": "PodInitializing"}}


def with_init(phase: str, **status: Any) -> JobBuilder:
    """A job whose pod 1 has an init container with this status."""
    return JobBuilder().all("pod").pod(1, phase, WAITING, initContainerStatuses=[{"name": "fetch", **status}])


def test_an_init_container_that_fails_is_the_cause_and_not_a_lost_pod() -> None:
    failed = with_init("Failed", state={"terminated": {"exitCode": 2, "reason": "Error", "finishedAt": MADE}})
    (cause,) = find(failed.view())
    assert (cause.code, cause.is_stuck(NOW)) == ("CrashLoop", True)
    assert f"{POD}: its init container fetch ended with exit code 2, and the pod is created again" in cause.sentence
    assert f"logs {POD} -c fetch" in cause.remedy
    failed.job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Never"
    state = failed.state()
    assert (state.phase, state.reason, state.pods[1].reason) == (Phase.FAILED, "RankFailed", "Init:Error")
    assert state.code == 100  # 2 would be that of a launcher
    assert "init container fetch ended with exit code 2" in state.message


def test_an_init_container_that_ends_again_and_again_is_named() -> None:
    states = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 3}}}
    (cause,) = find(with_init("Pending", **states).view())
    assert f"{POD}: init container fetch ends again and again with exit code 3" in cause.sentence
    assert f"logs {POD} -c fetch --previous" in cause.remedy
    assert "restart" not in cause.evidence[-1].text  # those of the training container are others


def test_an_init_container_that_fails_in_each_life_is_named_by_the_events_of_pods_that_are_gone() -> None:
    """The operator creates the pod again within three seconds, so it is seldom there, and never for long."""
    job = JobBuilder().pod(0).pod(2).condition("Restarting")
    job.event("SuccessfulCreatePod", f"Created pod: {POD}").event(
        "FailedCreatePod", f'Error creating: pods "{POD}" already exists'
    )
    for uid in "abc":
        assert [cause.code for cause in find(job.view())] == []  # the name is that of the former pod
        for container in ("first", "fetch"):
            job.event("Started", f"Started container {container}", "Pod", POD)
            job.events[-1]["involvedObject"] |= {"uid": uid, "fieldPath": f"spec.initContainers{{{container}}}"}
    (cause,) = find(job.view())
    assert cause.code == "CrashLoop"
    assert f"{POD}: its init container fetch ends, and no container after it starts" in cause.sentence
    assert f"logs {POD} -c fetch" in cause.remedy
    evicted = deepcopy(job).event("Evicted", "The node was low on memory", "Pod", POD, uid="b")
    assert find(evicted.view()) == []  # two have ended by themselves
    first = needs(job.view(answered=frozenset()))
    assert Need(What.EVENTS, POD, "Pod") in needs(job.view(answered=frozenset(first), logs={"gpt-worker-0": []}))
    job.event("Started", "Started container pytorch", "Pod", POD)
    job.events[-1]["involvedObject"] |= {"uid": "d", "fieldPath": "spec.containers{pytorch}"}
    assert find(job.view()) == []


def test_a_sidecar_that_ends_with_its_pod_is_not_the_init_container_that_failed() -> None:
    job = with_init("Failed", state={"terminated": {"exitCode": 3, "reason": "Error", "finishedAt": MADE}})
    sidecar = {"name": "proxy", "state": {"terminated": {"exitCode": 143, "reason": "Error", "finishedAt": MADE}}}
    job.pods[1]["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "fetch"}]
    job.pods[1]["status"]["initContainerStatuses"].insert(0, sidecar)
    assert "its init container fetch ended with exit code 3" in find(job.view())[0].sentence
    assert "created again" not in find(job.condition("Failed").view())[0].sentence


def test_a_sidecar_that_was_started_again_says_nothing_about_the_training_container() -> None:
    job = JobBuilder().all("pod")
    long, brief = {"startedAt": "2025-12-30T00:00:00Z"}, {"startedAt": MADE}
    status = job.pods[1]["status"]
    status["containerStatuses"][0] |= {"restartCount": 3, "lastState": {"terminated": {"finishedAt": MADE, **long}}}
    status["initContainerStatuses"] = [{"name": "proxy", "lastState": {"terminated": {"finishedAt": MADE, **brief}}}]
    assert find(job.view()) == []
