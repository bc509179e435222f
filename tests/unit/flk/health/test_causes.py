"""Every cause is found again in the objects that a real cluster had, with its words, and its page says something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk.__main__ import main
from flk.cli.why import text
from flk.health import CAUSES, cause_of, diagnose, find, page
from flk.jobs.state import Phase, derive
from flk.observe.model import PodPhase
from flk.observe.observation import Observation
from flk.observe.progress import Progress
from flk.observe.view import JobView
from flk.targets import TARGETS, Target
from flk.user.commands import Commands, Connection
from flk_runtime.contract import ExitCode
from tests.support import recorded
from tests.support.api_server import FakeApiServer
from tests.support.cause_cases import Case, Object
from tests.support.causes import CASES
from tests.support.jobs import NOW, JobBuilder
from tests.unit.flk.health.test_built_causes import BUILT, assert_that_nothing_is_printed_twice, failed, unscheduled


@pytest.mark.promise("Causes: flk why names one cause with its evidence and a remedy")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recorded(case: Case) -> None:
    expected, view = case.expected, recorded.load(recorded.FOLDER / f"{case.name}.json")
    answer = diagnose(view)
    assert answer.cause
    assert answer.cause.code == expected.code
    assert expected.sentence in answer.summary
    assert any(expected.evidence in item.text for item in answer.cause.evidence)
    assert any(item.time for item in answer.cause.evidence)
    ends = [item.text[-40:] for item in answer.cause.evidence]
    assert len({*ends}) == len(ends)  # an event that repeats its pod's message is not told again
    assert expected.remedy in answer.cause.remedy
    state = derive(view)
    assert (state.reason, state.message) == (expected.code, answer.summary)
    assert (
        state.phase in (Phase.FAILED, Phase.STUCK) if expected.stuck else state.phase not in (Phase.FAILED, Phase.STUCK)
    )
    if expected.stuck:
        assert state.code == expected.exit_code
    assert_that_nothing_is_printed_twice(view)


def test_the_level_of_a_line_of_a_log_is_no_evidence() -> None:
    said = "No matching distribution found for einopz"
    view = failed("usage", message=f"pip cannot install the packages: {said}", traceback=f"ERROR: {said}").view()
    answer = diagnose(view)
    assert answer.cause
    assert answer.cause.evidence[0].text == f"ERROR: {said}"
    assert "ERROR" not in text(answer, view.now)


def test_every_recorded_job_has_a_case() -> None:
    assert {path.stem for path in recorded.FOLDER.glob("*.json")} == {case.name for case in CASES}


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.code)
def test_page(cause: Any) -> None:
    text = page(cause)
    assert text.startswith(f"{cause.code}: {cause.title}.")
    assert all(part.strip().endswith(".") for part in (cause.meaning, cause.remedy))
    assert cause_of(cause.code.lower()) is cause


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause.awaits], ids=lambda cause: cause.code)
def test_each_wait_ends_or_says_for_whom(cause: Any) -> None:
    """Each wait for somebody else has a remedy, and ends with its exit code, or says what it waits for."""
    recordings = [case.name for case in CASES if case.expected.code == cause.code]
    view = recorded.load(recorded.FOLDER / f"{recordings[0]}.json") if recordings else BUILT[cause.code][0]()
    found = next(each for each in find(view) if each.code == cause.code)
    assert found.remedy
    limit = found.stuck_after if found.stuck_after is not None else found.grace
    view.now = max(view.now, found.since + limit)
    if found.resolves_itself and found.stuck_after is None:
        assert not found.is_stuck(view.now + 1e9)
        assert cause.cured_by or "else" in cause.stuck or "waited for" in cause.stuck or "waits" in cause.stuck
        return
    later = next(each for each in find(view) if each.code == cause.code)
    assert later.is_stuck(view.now)
    assert not later.is_stuck(later.since + limit - 1) or limit == 0
    assert later.exit_code == cause.exit_code


@pytest.mark.parametrize("later", ["", "Pulling"])
def test_a_pod_that_its_node_sets_up_at_last_is_no_trouble(later: str) -> None:
    job = JobBuilder().pod(0).pod(2).pod(1, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    job.event("FailedCreatePodSandBox", "no network", "Pod", "gpt-worker-1")
    if later:
        job.event(later, "Pulling image", "Pod", "gpt-worker-1", at="2026-01-01T00:00:50Z")
    assert [found.code for found in find(job.view())] == ([] if later else ["PodNotSetUp"])


def test_the_failures_to_set_up_a_pod_differ_and_its_grace_begins_with_the_first_one() -> None:
    job = JobBuilder().pod(0).pod(2).pod(1, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    job.event("FailedCreatePodSandBox", "before its image was pulled", "Pod", "gpt-worker-1")
    job.event("Pulled", "image", "Pod", "gpt-worker-1", at="2026-01-01T00:00:05Z")
    for second in (10, 50):
        said = f"failed to set up sandbox {second}"
        job.event("FailedCreatePodSandBox", said, "Pod", "gpt-worker-1", at=f"2026-01-01T00:00:{second}Z")
    (found,) = find(job.view())
    assert found.since == NOW - 50
    assert "sandbox 50" in found.sentence


@pytest.mark.parametrize(
    ("message", "itself"), [("3 cannot allocate all claims", True), ("device class a does not exist", False)]
)
def test_devices_of_other_jobs_are_waited_for_and_those_that_do_not_exist_are_not(message: str, itself: bool) -> None:
    (found,) = find(unscheduled(message).view())
    assert (found.code, found.resolves_itself) == ("DevicesNotAllocated", itself)


def test_an_operator_that_leaves_the_job_without_pods_and_says_nothing_is_blamed_at_last() -> None:
    job = JobBuilder(2).condition("Running").ended(0, 137)
    view = job.view(controllers={"operator": [deployment(1, 1)]})
    assert find(view) == []
    view.now += 900
    (found,) = find(view)
    assert (found.code, found.is_stuck(view.now)) == ("OperatorNotRunning", True)
    assert "has not created gpt-worker-0 and 1 other pod in 15m30s" in found.sentence
    view = job.pod(0).view()  # as an initializer, which the others wait for
    view.now += 900
    assert find(view) == []


@pytest.mark.parametrize("seen", ["Pending", "unread"])
def test_an_operator_that_waits_for_the_gang_scheduler_is_not_blamed(seen: str) -> None:
    group = {"metadata": {"name": "gpt"}, "spec": {"minMember": 3}, "status": {"phase": seen}}
    around = {"unreadable": frozenset({"podgroups"})} if seen == "unread" else {"pod_groups": [group]}
    view = JobBuilder().condition("Running").view(**around)
    view.now += 3600
    assert [found.code for found in find(view)] == ([] if seen == "unread" else ["WaitingForGang"])


@pytest.mark.promise("Causes: A job is stuck only after the grace of its cause")
def test_grace_comes_before_stuck() -> None:
    view = recorded.load(recorded.FOLDER / "image-missing.json")
    cause = find(view)[0]
    view.now = cause.since + cause.grace - 1
    assert derive(view).phase == Phase.STARTING
    view.now = cause.since + cause.grace
    assert derive(view).phase == Phase.STUCK


@pytest.mark.parametrize(
    ("reasons", "grace", "said"),
    [
        ([], 60, "no volume matches it"),
        (["ProvisioningFailed"], 60, "ProvisioningFailed"),  # the API server's own word: there is no such class
        (["ExternalProvisioning", "Provisioning"], 900, "Provisioning"),
        (["Provisioning", "ProvisioningFailed", "ExternalProvisioning"], 300, "ProvisioningFailed"),
    ],
)
def test_a_provisioner_gets_the_time_that_a_file_system_takes(reasons: list[str], grace: float, said: str) -> None:
    view = recorded.load(recorded.FOLDER / "claim-unbound.json")
    about = {"kind": "PersistentVolumeClaim", "name": "unbound"}
    others = [event for event in view.events if event["involvedObject"]["kind"] != "PersistentVolumeClaim"]
    view.events = [*others, *({"involvedObject": about, "reason": word, "message": word} for word in reasons)]
    cause = find(view)[0]
    assert (cause.code, cause.grace) == ("ClaimUnbound", grace)
    assert cause.sentence.endswith(f"(storage class nowhere): {said}")
    view.now = cause.since + grace - 1
    assert derive(view).phase == Phase.PENDING
    view.now = cause.since + grace
    assert derive(view).phase == Phase.STUCK


def deployment(wanted: int, ready: int) -> Object:
    """The training operator's, changed five seconds after the job was created."""
    meta = {"name": "training-operator", "namespace": "kubeflow", "managedFields": [{"time": "2026-01-01T00:00:05Z"}]}
    return {"metadata": meta, "spec": {"replicas": wanted}, "status": {"readyReplicas": ready}}


@pytest.mark.parametrize(
    ("wanted", "says", "remedy"),
    [
        (0, "is scaled to 0 pods", "kubectl scale deployment training-operator --replicas 1 -n kubeflow"),
        (
            1,
            "has no pod that is ready",
            "kubectl describe pods -l control-plane=kubeflow-training-operator -n kubeflow",
        ),
    ],
)
def test_pods_that_no_operator_creates(wanted: int, says: str, remedy: str) -> None:
    job = JobBuilder().condition("Running").pod(0).ended(2, 137)
    view = job.view(controllers={"operator": [deployment(wanted, 0)]})
    (cause,) = find(view)
    assert cause.code == "OperatorNotRunning"
    assert cause.sentence == f"the training operator {says}, so nothing creates gpt-worker-1 and 1 other pod"
    assert cause.remedy == remedy
    assert [(item.source, item.text) for item in cause.evidence] == [
        ("Deployment training-operator in namespace kubeflow", f"0 of {wanted}" if wanted else "0"),
        ("pod gpt-worker-1", "it does not exist"),
    ]
    assert derive(view).phase == Phase.PENDING  # an operator may be away for a moment
    view.now = NOW + 120
    assert (derive(view).phase, derive(view).code) == (Phase.STUCK, ExitCode.INFRASTRUCTURE)


def test_an_operator_that_is_ready_or_unknown_is_not_blamed_for_pods_that_are_gone() -> None:
    job = JobBuilder().condition("Running").pod(0).pod(1)
    for deployments in ([deployment(1, 1)], [deployment(0, 0), deployment(1, 1)], []):
        assert find(job.view(controllers={"operator": deployments})) == []
    assert find(JobBuilder().all("pod").view(controllers={"operator": [deployment(0, 0)]})) == []


def test_why_reads_the_deployment_of_an_operator_that_has_not_touched_the_job(
    fake: FakeApiServer, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JobBuilder()
    job.job["status"] = {}
    job.add_to(fake)
    fake.documents["/apis/apps/v1/deployments"] = {"items": [deployment(0, 0)], "metadata": {}}
    assert main(["why", "gpt", "--context", "fake"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "OperatorNotRunning: the training operator is scaled to 0 pods, so nothing creates gpt-worker-0"
    )
    assert "PyTorchJob gpt: status" in said
    assert "kubectl scale deployment training-operator --replicas 1 -n kubeflow --context fake" in said


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_command_that_shows_the_operator_is_for_the_context(target: Target) -> None:
    job = {**JobBuilder().job, "kind": target.kind, "status": {}}
    view = JobView(Observation(job, time=NOW + 600), Commands("team", Connection("fake")))
    remedy = next(found.remedy for found in find(view) if found.code == "OperatorNotRunning")
    assert remedy.startswith(f"kubectl {target.controller_pods} --context fake shows")


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ({}, ""),
        ({"data_wait": 0.29, "communication": 0.9}, ""),
        ({"data_wait": 0.6}, "; rank 0 waits for data 60% of the time"),
    ],
)
def test_nothing_is_wrong(waits: dict[str, float], told: str) -> None:
    seen = JobBuilder().all("pod").condition("Running").view().seen
    answer = diagnose(JobView(replace(seen, progress=[Progress(0, 5, NOW, **waits)])))
    assert (answer.cause, answer.known) == (None, True)
    assert answer.summary == f"nothing is wrong: 3 pods of 3 run{told}"


@pytest.mark.promise("Causes: flk why names one cause with its evidence and a remedy")
@pytest.mark.parametrize(("now", "said"), [(NOW, "unknown"), (NOW - 1, "nothing is wrong yet")])
def test_unknown_says_what_was_examined(now: float, said: str) -> None:
    stuck = JobBuilder().all("pod", "Pending", {"waiting": {"reason": "ContainerCreating"}})
    answer = diagnose(JobView(replace(stuck.seen(), time=now)))
    assert (answer.cause, answer.known) == (None, said != "unknown")
    assert answer.summary.startswith(f"{said}: 0 of 3 pods run")
    assert "3 pods: 3 Starting" in answer.examined


def test_what_was_resolved_is_not_the_cause() -> None:
    job = JobBuilder().all("pod").condition("Running")
    job.event("FailedScheduling", "0/3 nodes are available", "Pod", "gpt-worker-1")
    job.event("FailedMount", "object not registered", "Pod", "gpt-worker-1")
    told = {other.why_not for other in diagnose(job.view()).others}
    assert told == {"resolved: the pod has node node-a since", "resolved: the volumes were mounted after it"}


@pytest.mark.parametrize(
    "left", ['{"outcome":"replaced","code":144,"attempts":[{"number":0}]}', 'loss": 0.5} [rank 0] {"step": 20}']
)
def test_what_a_container_leaves_in_an_event_of_the_operator_is_no_text_for_people(left: str) -> None:
    job = JobBuilder().all("pod").condition("Running")
    begin = "Error pod gpt-worker-1 container pytorch exitCode: 144"
    job.event("Error", f"{begin} terminated message: {left}")
    (other,) = diagnose(job.view()).others
    assert other.text == f"event of PyTorchJob gpt: Error: {begin}"
    assert other.why_not.startswith("a consequence: the operator says how a container ended")
    job.pods.clear()
    texts = [other.text for other in diagnose(job.view()).others if begin in other.text]
    assert ["loss" in text for text in texts] == ["loss" in left]


def test_events_that_repeat_the_cause_are_left_out() -> None:
    job = JobBuilder().all("ended", 3).condition("Failed")
    job.event("BackOff", "Back-off restarting failed container pytorch", "Pod", "gpt-worker-1")
    job.event("Odd", "an event that nobody knows", "Pod", "gpt-worker-1")
    answer = diagnose(job.view())
    assert answer.cause
    assert answer.cause.code == "RankFailed"
    assert [other.text for other in answer.others if other.text.startswith("event")] == [
        "event of Pod gpt-worker-1: Odd: an event that nobody knows"
    ]


def test_an_event_of_another_pod_than_the_cause_s_does_not_repeat_it() -> None:
    job = JobBuilder().pod(0).ended(1, 3).condition("Failed")
    job.pod(2, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    job.event("FailedMount", "MountVolume.SetUp failed: stale NFS handle", "Pod", "gpt-worker-2")
    shown = [other.text for other in diagnose(job.view()).others]
    assert "event of Pod gpt-worker-2: FailedMount: MountVolume.SetUp failed: stale NFS handle" in shown


def test_a_name_with_the_name_of_another_pod_in_it() -> None:
    """The event about worker-12 says nothing of worker-1."""
    job = JobBuilder(replicas=13).all("pod")
    del job.pods[1], job.pods[12]
    job.event("FailedCreatePod", 'Error creating: pods "gpt-worker-12" is forbidden: exceeded quota')
    pods = {pod.name: pod.reason for pod in job.state().pods}
    assert (pods["gpt-worker-1"], pods["gpt-worker-12"]) == ("", "FailedCreatePod")


def test_the_name_of_a_pod_that_is_being_replaced_need_not_resolve() -> None:
    view = recorded.load(recorded.FOLDER / "name-not-resolved.json")
    assert "NameNotResolved" in [cause.code for cause in find(view)]
    view.pods[0] = replace(view.pods[0], phase=PodPhase.PENDING)
    assert "NameNotResolved" not in [cause.code for cause in find(view)]


def test_foreign_job_blames_the_rank_that_raised(tmp_path: Path) -> None:
    """Rank 0 ends first, with a broken connection; rank 2 has the exception."""
    job = JobBuilder().ended(0, 1, at=20).ended(1, 1, at=21).ended(2, 1, at=22)
    job.job["metadata"]["labels"] = {}
    lost = [
        "Traceback (most recent call last):",
        '  File "t.py", line 1',
        "ConnectionResetError: Connection reset by peer",
    ]
    raised = ["Traceback (most recent call last):", '  File "t.py", line 2', "ValueError: no label"]
    logs = {"gpt-worker-0": lost, "gpt-worker-1": lost, "gpt-worker-2": raised}
    answer = diagnose(job.view(logs=logs))
    assert answer.summary == "rank 2 in gpt-worker-2 raised ValueError: no label"
    without = diagnose(replace_logs(job, logs))
    assert "gpt-worker-0" in without.summary


def replace_logs(job: JobBuilder, logs: dict[str, list[str]]) -> Any:
    view = job.view(logs=logs)
    view.seen = replace(view.seen, logs={**logs, "gpt-worker-2": []})
    return view
