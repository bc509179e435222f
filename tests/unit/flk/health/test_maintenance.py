"""Maintenance of a cluster: nodes are cordoned and drained, and pods deleted. No job fails because of that."""

from __future__ import annotations

from typing import Any

import pytest

from flk.health import find
from flk.jobs.state import Phase, derive
from tests.support.jobs import MADE, NOW, JobBuilder

POD = "gpt-worker-1"


def pending(message: str, spec: dict[str, Any] | None = None) -> JobBuilder:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": MADE}
    said["message"] = f"0/3 nodes are available: {message}."
    job = JobBuilder().all("pod", "Pending", {}, node="", conditions=[said])
    for pod in job.pods.values():
        pod["spec"] |= spec or {}
    return job


def node(name: str, *, cordoned: bool = False, labels: dict[str, str] | None = None, cpu: str = "4") -> dict[str, Any]:
    taints = [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}] if cordoned else []
    spec = {"unschedulable": cordoned, "taints": taints}
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
        "status": {"allocatable": {"cpu": cpu, "pods": "9"}},
    }


def test_pods_that_were_deleted_once_are_in_no_restart_loop() -> None:
    """One deletion of one pod, as the operator tells it: 143, with a count of 4."""
    control_plane = "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }"
    job = pending(f"{control_plane}, 2 node(s) were unschedulable")
    for index in range(3):
        job.ran(index, f"earlier-{index}", until="Killing")
        job.event("ExitedWithCode", f"Pod: team.gpt-worker-{index} exited with code 143", count=4)
    view = job.view()
    view.now = NOW + 3600
    assert [finding.code for finding in find(view)] == ["NodesNotReady"]
    assert derive(view).phase == Phase.PENDING


@pytest.mark.parametrize("reason", ["Killing", "Evicted", "Preempted", "TaintManagerEviction"])
def test_ends_from_outside_do_not_count_as_restarts(reason: str) -> None:
    job = JobBuilder().all("pod").ran(1, *"abcdef", until=reason)
    job.event("ExitedWithCode", f"Pod: team.{POD} exited with code 143", count=12)
    assert find(job.view()) == []
    job.ran(1, "g", "h", "i", "pod-1")  # the last one runs
    (cause,) = find(job.view())
    assert (cause.code, "(3 times)" in cause.sentence) == ("CrashLoop", True)


def test_events_about_an_earlier_pod_of_the_name_are_not_about_the_present_one() -> None:
    waiting = JobBuilder().pod(0).pod(2).pod(1, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    waiting.event("Preempted", "by pod other", "Pod", POD, uid="first").ran(1, "earlier").event(
        "FailedMount", "no such volume", "Pod", POD, uid="earlier"
    )
    assert (waiting.state().reason, waiting.state().pods[1].reason) == ("", "")
    waiting.event("FailedMount", "no such volume", "Pod", POD, uid="pod-1")
    assert (waiting.state().reason, waiting.state().pods[1].reason) == ("MountFailed", "FailedMount")
    waiting.event("Pulling", "Pulling image", "Pod", POD, uid="pod-1")
    waiting.events[-1]["type"] = "Normal"
    assert (waiting.state().reason, waiting.state().pods[1].reason) == ("", ""), "it pulls when its volumes are mounted"


@pytest.mark.parametrize(
    ("uid", "ready", "codes"), [("pod-1", "False", ["NodeLost"]), ("pod-1", "True", []), ("earlier", "False", [])]
)
def test_a_node_that_was_silent_for_a_while_is_not_lost(uid: str, ready: str, codes: list[str]) -> None:
    job = JobBuilder().all("pod").pod(1, conditions=[{"type": "Ready", "status": ready}])
    job.event("NodeNotReady", "Node is not ready", "Pod", POD, uid=uid)
    assert [cause.code for cause in find(job.view())] == codes


def test_what_keeps_pods_from_a_node_now_comes_before_what_ended_them() -> None:
    job = pending("3 node(s) were unschedulable")
    drained = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drain"}
    job.replaced_pods = {POD: {"metadata": {"name": POD}, "status": {"conditions": [drained]}}}
    assert [finding.code for finding in find(job.view())] == ["NodesNotReady", "Evicted"]
    elsewhere = JobBuilder().pod(0).pod(2)  # nothing keeps it away: its replacement is not there yet
    elsewhere.replaced_pods = job.replaced_pods
    assert [finding.code for finding in find(elsewhere.view())] == ["Evicted"]


OTHER_NODE = "node(s) didn't match PersistentVolume's node affinity"


@pytest.mark.parametrize(
    ("message", "code", "phase"),
    [
        (f"1 node(s) were unschedulable, 2 {OTHER_NODE}", "NodesNotReady", Phase.PENDING),
        (
            f"1 node(s) had untolerated taint {{node.kubernetes.io/unreachable: }}, 2 {OTHER_NODE}",
            "NodesNotReady",
            Phase.PENDING,
        ),
        (f"1 Insufficient cpu, 2 {OTHER_NODE}", "NotEnoughResources", Phase.PENDING),
        (f"3 {OTHER_NODE}", "VolumeOnOtherNode", Phase.STUCK),
    ],
)
def test_the_node_of_a_volume_may_be_one_that_is_away_or_full(message: str, code: str, phase: Phase) -> None:
    view = pending(message).view()
    view.now = NOW + 600
    assert (find(view)[0].code, derive(view).phase) == (code, phase)


def test_the_nodes_of_a_selector_may_be_cordoned() -> None:
    message = "1 node(s) were unschedulable, 2 node(s) didn't match Pod's node affinity/selector"
    job = pending(message, {"nodeSelector": {"disk": "fast"}})
    nodes = {"a": node("a", cordoned=True, labels={"disk": "fast"}), "b": node("b")}
    assert find(job.view(nodes=nodes))[0].code == "NodesNotReady"
    nodes = {"a": node("a", cordoned=True), "b": node("b")}
    assert find(job.view(nodes=nodes))[0].code == "NodeSelectorMismatch"


def test_a_large_node_that_is_cordoned_may_come_back() -> None:
    job = pending("1 node(s) were unschedulable, 2 Insufficient cpu")
    job.container["resources"] = {"requests": {"cpu": "8"}}
    nodes = {"large": node("large", cordoned=True, cpu="16"), "small": node("small")}
    assert find(job.view(nodes=nodes))[0].resolves_itself
    assert not find(job.view(nodes={"small": node("small")}))[0].resolves_itself


@pytest.mark.promise("Causes: A job is stuck only after the grace of its cause")
@pytest.mark.parametrize("again", [False, True])
def test_a_container_that_ran_for_hours_has_its_grace_when_it_ends(again: bool) -> None:
    """It was scheduled long ago. The kubelet starts it again, and it may run."""
    crash: dict[str, Any] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2025-12-31T18:00:00Z"}
    job = JobBuilder().all("pod").pod(1, "Running", crash, conditions=[scheduled]).condition("Running")
    started = "2026-01-01T00:00:56Z" if again else "2025-12-31T18:00:10Z"
    ended = {"exitCode": 1, "startedAt": started, "finishedAt": "2026-01-01T00:00:57Z"}
    job.pods[1]["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": {"terminated": ended}}
    job.event("BackOff", "Back-off restarting failed container pytorch", "Pod", POD, at="2026-01-01T00:00:56Z")
    (cause,) = find(job.view())
    assert (cause.code, derive(job.view()).phase) == ("CrashLoop", Phase.RESTARTING)
    view = job.view()
    view.now = NOW + 600
    assert derive(view).phase == Phase.STUCK


def test_a_container_that_runs_for_a_moment_again_is_still_in_its_loop() -> None:
    job = JobBuilder().all("pod").condition("Running")
    job.job["metadata"]["labels"] = {}
    container = job.pods[1]["status"]["containerStatuses"][0]
    container["restartCount"] = 5
    container["lastState"] = {"terminated": {"exitCode": 1, "startedAt": MADE, "finishedAt": MADE}}
    (cause,) = find(job.view())
    assert (cause.code, cause.sentence) == ("CrashLoop", f"{POD}: the container ends again and again with exit code 1")
    view = job.view()
    view.now = NOW + 600
    assert find(view) == []
    container["lastState"]["terminated"]["finishedAt"] = "2026-01-01T00:20:00Z"
    assert find(job.view()) == []
