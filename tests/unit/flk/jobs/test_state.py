"""What is true of a job, from its objects; these are built, not written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flk.jobs import state as states
from flk.jobs.state import Phase
from flk.observe.observation import Need, Observation, What
from flk.observe.view import JobView
from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt, JobRecord
from tests.support.jobs import MADE, NOW, JobBuilder, record

RAISED = Failure(Kind.EXCEPTION, 2, 2, "gpt-worker-2", "node-a", 0, NOW - 30, "ValueError", "bad shard", "Traceback\n…")
LOST = Failure(Kind.LOST, 2, None, "gpt-worker-2", time=NOW - 31, message="was restarted")


# Before it runs


def test_operator_that_has_not_seen_it() -> None:
    silent = JobBuilder()
    silent.job["status"] = {}
    state = silent.state()
    assert (state.phase, state.reason) == (Phase.PENDING, "OperatorNotRunning")
    assert "has not touched the job" in state.message
    assert state.code == ExitCode.RUNNING


def test_operator_has_a_moment() -> None:
    silent = JobBuilder()
    silent.job["status"] = {}
    silent.job["metadata"]["creationTimestamp"] = "2026-01-01T00:00:55Z"
    assert silent.state().reason == ""


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (100, "Failed")])
def test_container_that_has_ended_while_its_pod_is_still_called_running(code: int, phase: str) -> None:
    ending = JobBuilder().all("pod").condition("Running").ended(1, code)
    ending.record = record(None, None)
    ending.pods[1]["status"]["phase"] = "Running"
    state = ending.state()
    assert state.pods[1].phase == phase
    assert state.phase == (Phase.RUNNING if code == 0 else Phase.FAILED)


def test_a_suspended_job_of_a_queue_is_queued() -> None:
    queued = JobBuilder()
    queued.job["spec"]["runPolicy"]["suspend"] = True
    queued.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gold"
    assert queued.state().headline == "queued: WaitingInQueue: it waits in queue gold; Kueue has no Workload for it yet"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("ImagePullBackOff", "ImagePullFailed"),
        ("ErrImagePull", "ImagePullFailed"),
        ("InvalidImageName", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerStartFailed"),
        ("CrashLoopBackOff", "CrashLoop"),
    ],
)
def test_container_that_cannot_start(reason: str, code: str) -> None:
    phase = "Running" if reason == "CrashLoopBackOff" else "Pending"
    waiting = {"waiting": {"reason": reason, "message": "because\nof this"}}
    state = JobBuilder().all("pod").pod(1, phase, waiting).state()
    assert state.phase == (Phase.STARTING if code == "ImagePullFailed" else Phase.STUCK)
    assert (state.reason, state.ready) == (code, 2)
    assert state.cause
    assert "because of this" in state.cause.evidence[0].text


def test_container_that_is_being_made_is_no_trouble() -> None:
    state = JobBuilder().all("pod", "Pending", {"waiting": {"reason": "ContainerCreating"}}).state()
    assert (state.phase, state.reason) == (Phase.STARTING, "")


def test_volume_that_cannot_be_mounted() -> None:
    stuck = JobBuilder(1).pod(0, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    state = stuck.event("FailedMount", 'claim "data" not found', "Pod", "gpt-worker-0").state()
    assert (state.phase, state.reason) == (Phase.STARTING, "MountFailed")
    assert 'claim "data" not found' in state.message


# While it runs


def test_a_running_job_counts_its_pods_and_ranks() -> None:
    state = JobBuilder(processes=2).all("pod").condition("Running").state()
    assert (state.phase, state.ready, state.world_size) == (Phase.RUNNING, 3, 6)
    assert [pod.ranks for pod in state.pods] == [[0, 1], [2, 3], [4, 5]]
    assert state.code == ExitCode.RUNNING


def test_condition_running_does_not_hide_a_pod_that_is_missing() -> None:
    state = JobBuilder().pod(0).pod(1).condition("Running").state()
    assert (state.phase, state.ready) == (Phase.PENDING, 2)


@pytest.mark.parametrize("code", [137, 143])
def test_pod_that_is_recreated(code: int) -> None:
    state = JobBuilder().all("pod").ended(1, code).condition("Restarting").state()
    assert (state.phase, state.code) == (Phase.RESTARTING, ExitCode.RUNNING)


def test_evicted_pod_is_recreated() -> None:
    evicted = JobBuilder().all("pod").pod(1, "Failed", {}, reason="Evicted", message="low on memory")
    del evicted.pods[1]["status"]["containerStatuses"]
    state = evicted.condition("Running").state()
    assert not state.finished
    assert (state.pods[1].reason, state.pods[1].message) == ("Evicted", "low on memory")


@pytest.mark.parametrize(
    ("policy", "failed"),
    [("Always", False), ("OnFailure", False), ("ExitCode", False), ("Never", True), (None, False)],
)
def test_an_evicted_pod_of_any_job_is_treated_as_the_operator_treats_it(policy: str | None, failed: bool) -> None:
    job = JobBuilder().all("pod").pod(1, "Failed", {}, reason="Evicted", message="low on memory").condition("Running")
    del job.pods[1]["status"]["containerStatuses"]
    job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = policy
    assert (job.state().phase == Phase.FAILED) == failed
    ended = JobBuilder().all("pod").ended(1, 1).condition("Running")
    ended.job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = policy
    assert (ended.state().phase == Phase.FAILED) == (policy in ("Never", "ExitCode"))


@pytest.mark.parametrize(
    ("policy", "code", "phase"),
    [("OnFailure", 0, "Succeeded"), ("OnFailure", 1, "Starting"), ("Always", 0, "Starting"), ("Never", 1, "Failed")],
)
def test_a_pod_whose_sidecar_runs_on_has_ended_unless_its_container_starts_again(
    policy: str, code: int, phase: str
) -> None:
    job = JobBuilder().all("pod", state={"terminated": {"exitCode": code}})
    for pod in job.pods.values():
        pod["spec"]["restartPolicy"] = policy
    state = job.state()
    assert ({pod.phase for pod in state.pods}, state.phase == Phase.SUCCEEDED) == ({phase}, phase == "Succeeded")


def test_attempts_of_a_running_job_are_in_its_record() -> None:
    running = JobBuilder().all("pod")
    running.record = record(None, RAISED, LOST, None, outcome="running")
    state = running.state()
    assert (state.phase, state.attempt, state.restarts, state.max_restarts) == (Phase.RUNNING, 3, 1, 3)
    assert (state.disruptions, state.max_disruptions) == (1, 100)
    assert [attempt.outcome for attempt in state.attempts] == ["failed", "failed", "running"]
    assert state.attempts[0].cause == "rank 2 in gpt-worker-2 raised ValueError: bad shard"
    assert state.failure is None


@pytest.mark.promise("Causes: flk status, list and wait agree")
def test_a_job_started_with_its_first_attempt_and_not_with_its_present_pods() -> None:
    job = JobBuilder().all("pod", state={"running": {"startedAt": "2026-01-01T00:00:55Z"}})
    job.record = record(None, LOST, None, outcome="running")
    assert job.state().started == NOW - 50
    ended = JobBuilder().all("ended", 0).condition("Succeeded")
    for pod in ended.pods.values():
        pod["status"]["containerStatuses"][0]["state"]["terminated"]["startedAt"] = "2026-01-01T00:00:25Z"
    ended.record = record(None, LOST, None, outcome="succeeded")
    assert ended.state().started == NOW - 50


def test_a_foreign_job_started_before_its_container_was_started_again_or_its_pod_was_replaced() -> None:
    again = JobBuilder().all("pod", state={"running": {"startedAt": "2026-01-01T00:00:55Z"}})
    again.pods[1]["status"] |= {"startTime": "2026-01-01T00:00:02Z"}
    again.pods[1]["status"]["containerStatuses"][0]["restartCount"] = 1
    assert again.state().started == NOW - 58
    replaced = JobBuilder().all("pod", state={"running": {"startedAt": "2026-01-01T00:00:55Z"}})
    replaced.replaced_pods = {"gpt-worker-1": {"metadata": {"name": "gpt-worker-1"}, "status": {"startTime": MADE}}}
    assert replaced.state().started == NOW - 60


def test_a_job_started_when_the_record_of_its_launchers_says() -> None:
    job = JobBuilder(1).pod(0, state={"running": {"startedAt": "2026-01-01T00:00:30Z"}})
    job.record = JobRecord("running", 0, attempts=[Attempt(30, NOW - 20)], started=NOW - 55)
    assert job.state().started == NOW - 55


def test_json_counts_attempts_from_1_everywhere() -> None:
    job = JobBuilder().all("ended", 100).condition("Failed")
    failure = replace(RAISED, attempt=1)
    job.record = record(failure, RAISED, failure)
    data = job.state().to_dict()
    assert [attempt["number"] for attempt in data["attempts"]] == [1, 2]
    assert [attempt["failure"]["attempt"] for attempt in data["attempts"]] == [1, 2]
    assert data["failure"]["attempt"] == 2


def test_pods_of_a_suspended_job_are_not_missing() -> None:
    job = JobBuilder().pod(0)
    job.job["spec"]["runPolicy"]["suspend"] = True
    assert [pod.phase for pod in job.state().pods] == ["Running", "Suspended", "Suspended"]


def test_between_two_attempts() -> None:
    between = JobBuilder().all("pod")
    between.record = record(None, RAISED, outcome="running")
    assert between.state().phase == Phase.RESTARTING


def test_being_deleted() -> None:
    going = JobBuilder().all("pod")
    going.job["metadata"]["deletionTimestamp"] = MADE
    assert going.state().phase == Phase.TERMINATING


# Its end


def test_succeeded_when_all_pods_are_even_before_the_operator_says_so() -> None:
    state = JobBuilder().all("ended", 0, record(None).to_json()).condition("Running").state()
    assert (state.phase, state.code) == (Phase.SUCCEEDED, ExitCode.DONE)
    assert state.attempts[-1].outcome == "succeeded"
    assert state.ended == NOW - 30


def test_failure_names_rank_pod_and_exception() -> None:
    state = JobBuilder().all("ended", 100, record(RAISED).to_json()).condition("Failed").state()
    assert (state.phase, state.code, state.reason) == (Phase.FAILED, ExitCode.TRAINING, "ExceptionRaised")
    assert state.message == "rank 2 in gpt-worker-2 raised ValueError: bad shard"
    assert state.failure == RAISED
    assert "flk-record" not in json.dumps(state.to_dict())


def test_verdict_is_enough_before_the_operator_says_so() -> None:
    state = JobBuilder().all("pod").ended(2, 100, record(RAISED).to_json()).condition("Running").state()
    assert (state.phase, state.failure) == (Phase.FAILED, RAISED)


def test_secondary_failure_is_never_the_cause() -> None:
    secondary = replace(
        RAISED, rank=0, pod=0, pod_name="gpt-worker-0", time=NOW - 99, type="RuntimeError", kind=Kind.CONNECTION
    )
    lost = replace(LOST, time=NOW - 100)
    ended = JobBuilder().ended(0, 100, record(secondary).to_json()).ended(1, 104, record(lost).to_json())
    assert ended.ended(2, 100, record(RAISED).to_json()).state().failure == RAISED


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Kind.USAGE, 2),
        (Kind.EXCEPTION, 100),
        (Kind.EXIT, 100),
        (Kind.SIGNAL, 100),
        (Kind.OOM, 104),
        (Kind.LOST, 104),
    ],
)
def test_code_is_the_failures(kind: Kind, code: int) -> None:
    failure = replace(RAISED, kind=kind)
    assert JobBuilder().all("ended", code, record(failure).to_json()).condition("Failed").state().code == code


def test_container_that_was_killed_by_the_memory_limit() -> None:
    """With cgroup v2 the launcher goes too, the operator starts the pod anew, and only its event tells."""
    lost = JobBuilder(memory="512Mi").all("ended", 104, record(LOST).to_json()).condition("Failed")
    assert lost.state().reason == "PodLost"
    lost.event("OOMKilled", "Error pod gpt-worker-2 container pytorch exitCode: 137 terminated message: ")
    lost.events[-1]["lastTimestamp"] = "2026-01-01T00:00:29Z"
    state = lost.state()
    assert (state.code, state.reason) == (ExitCode.INFRASTRUCTURE, "OutOfMemory")
    assert "gpt-worker-2 ran out of memory" in state.message
    assert "512Mi" in state.attempts[-1].cause


def at(seconds: float) -> str:
    """So many seconds after the job was made, as a kubelet writes it."""
    return f"2026-01-01T00:{int(seconds) // 60:02}:{seconds % 60:012.9f}Z"


@pytest.mark.parametrize(("said", "reason"), [(20.5, ""), (21.5, "RankNeverJoined")])
def test_a_line_from_before_the_attempt_that_runs_says_nothing_of_it(said: float, reason: str) -> None:
    job = JobBuilder(2).all("pod").condition("Running")
    job.record = JobRecord("running", 0, attempts=[Attempt(0, NOW - 60, NOW - 40, LOST), Attempt(1, NOW - 39)])
    log = "[pod 0] 1 of 2 pods have joined; waiting for pod 1"
    around = {"logs": {"gpt-worker-0": [log]}, "log_times": {"gpt-worker-0": [at(said)]}}
    assert job.state(**around).reason == reason


@pytest.mark.parametrize(
    ("printed", "after", "phase", "reason"),
    [
        (0, 300, Phase.STUCK, "RankNeverJoined"),
        (2, 300, Phase.STARTING, "RankNeverJoined"),
        (0, 20, Phase.STARTING, "RankNeverJoined"),
        (0, 19, Phase.RUNNING, ""),
    ],
)
def test_a_pod_that_still_prints_may_yet_join(printed: float, after: float, phase: Phase, reason: str) -> None:
    job = JobBuilder(2).all("pod").condition("Running")
    lines = {"gpt-worker-0": ["[pod 0] 1 of 2 pods have joined; waiting for pod 1"], "gpt-worker-1": ["[pod 1] setup"]}
    seen = job.seen(logs=lines, log_times={"gpt-worker-1": [at(printed)]})
    state = states.derive(JobView(replace(seen, time=NOW - 60 + after)))
    assert (state.phase, state.reason) == (phase, reason)


def test_a_restart_is_as_old_as_the_loss_of_the_pod() -> None:
    job = JobBuilder(2).all("pod").condition("Running")
    job.record = JobRecord("running", 0, attempts=[Attempt(0, NOW - 55)])
    assert job.state().phase == Phase.RUNNING
    job.pods[1]["metadata"]["deletionTimestamp"] = at(40)
    assert (job.state().phase, job.state().since) == (Phase.RESTARTING, NOW - 20)
    job.pod(1, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    job.pods[1]["metadata"]["creationTimestamp"] = at(42)
    assert (job.state().phase, job.state().since) == (Phase.RESTARTING, NOW - 18)
    job.pod(1, state={"running": {"startedAt": at(45)}})
    assert (job.state().phase, job.state().since) == (Phase.RESTARTING, NOW - 15)  # the record tells of no new attempt
    assert job.state().message == "the launchers meet for the next attempt"
    job.record = JobRecord("running", 0, attempts=[Attempt(0, NOW - 55, NOW - 20, LOST), Attempt(1, NOW - 14)])
    assert (job.state().phase, job.state().since) == (Phase.RUNNING, NOW - 14)
    del job.pods[1]
    job.record = JobRecord("running", 0, attempts=[Attempt(0, NOW - 55)])
    assert (job.state().phase, job.state().since) == (Phase.RESTARTING, None)  # and not the age of the job
    assert job.state().message == "it waits for gpt-worker-1 to run again"
    job.record = JobRecord("succeeded", 0, attempts=[Attempt(0, NOW - 55)])
    assert job.state().message == ""  # the pod ends, and nobody waits for it


def killed_container() -> JobBuilder:
    """A job that has ended because a launcher was killed with its container, at 00:00:29 by the leader's clock."""
    killed = replace(LOST, kind=Kind.CONTAINER_KILLED, message="")
    return JobBuilder(memory="512Mi").all("ended", 104, record(killed).to_json()).condition("Failed")


@pytest.mark.parametrize(
    "around",
    [
        {"answered": frozenset()},
        {"unread": {Need(What.EVENTS, "gpt-worker-2", "Pod"): "the API server did not answer"}},
        {"time": NOW + 3600},
    ],
    ids=["not asked for", "not read", "forgotten"],
)
@pytest.mark.parametrize("job", ["recorded", "foreign"])
def test_events_that_were_not_read_are_no_proof_of_a_lack_of_memory(around: dict[str, Any], job: str) -> None:
    seen = (killed_container() if job == "recorded" else killed_at_its_limit()).seen()
    state = states.derive(JobView(replace(seen, **around)))
    assert (state.reason, "memory helps" in state.message) == (
        "PodLost" if job == "recorded" else "RankFailed",
        False,
    )
    assert "ran out" not in str(state.to_dict())


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("Killing", "Stopping container pytorch"),
        ("Evicted", "The node was low on resource: ephemeral-storage."),
        ("TaintManagerEviction", "Marking for deletion Pod team/gpt-worker-2"),
    ],
)
def test_container_whose_kill_an_event_explains_was_not_killed_by_the_memory_limit(reason: str, message: str) -> None:
    killed = killed_container()
    assert killed.state().reason == "OutOfMemory"
    killed.event(reason, message, "Pod", "gpt-worker-2", at="2026-01-01T00:00:28Z")
    state = killed.state()
    assert (state.code, state.reason) == (ExitCode.INFRASTRUCTURE, "PodLost")
    assert f"gpt-worker-2 was killed ({reason}: {message})" in state.message
    assert state.attempts[-1].cause == f"gpt-worker-2 was killed ({reason}: {message})"


def test_replaced_pod_that_was_killed_by_the_memory_limit() -> None:
    lost = JobBuilder().all("ended", 104, record(LOST).to_json()).condition("Failed")
    lost.replaced_pods["gpt-worker-2"] = JobBuilder().ended(2, 137, reason="OOMKilled").pods[2]
    assert lost.state().reason == "OutOfMemory"


def killed_at_its_limit() -> JobBuilder:
    """A job of somebody else's manifest whose pods are not started again. One of them got SIGKILL."""
    job = JobBuilder(memory="512Mi").all("pod").ended(2, 137).condition("Failed")
    job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Never"
    return job


def test_kill_that_containerd_did_not_attribute_to_the_memory_limit() -> None:
    """On a busy node some containers that the kernel killed at their limit end with Error instead of OOMKilled."""
    state = killed_at_its_limit().state()
    assert (state.code, state.reason) == (ExitCode.INFRASTRUCTURE, "OutOfMemory")
    assert "nothing else explains its SIGKILL; the limit is 512Mi; a larger --memory helps" in state.message


def test_lost_launcher_that_got_sigkill_at_an_unknown_hand() -> None:
    lost = JobBuilder(memory="512Mi").all("ended", 104, record(LOST).to_json()).condition("Failed")
    lost.event("Error", "Error pod gpt-worker-2 container pytorch exitCode: 137 terminated message: ")
    lost.events[-1]["lastTimestamp"] = "2026-01-01T00:00:29Z"
    state = lost.state()
    assert state.reason == "OutOfMemory"
    assert "nothing else explains its SIGKILL" in state.attempts[-1].cause
    lost.event("Killing", "Stopping container pytorch", "Pod", "gpt-worker-2", at="2026-01-01T00:00:28Z")
    assert lost.state().reason == "PodLost"


def test_deleted_pod_that_did_not_end_in_its_grace_period() -> None:
    lost = JobBuilder(memory="512Mi").all("ended", 104, record(LOST).to_json()).condition("Failed")
    replaced = JobBuilder(memory="512Mi").ended(2, 137).pods[2]
    lost.replaced_pods["gpt-worker-2"] = replaced
    assert lost.state().reason == "OutOfMemory"
    replaced["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"  # the end of the grace period
    assert lost.state().reason == "PodLost"
    replaced["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"  # the operator has deleted the killed pod
    assert lost.state().reason == "OutOfMemory"


def without_limit(job: JobBuilder) -> None:
    for pod in job.pods.values():
        pod["spec"]["containers"][0].pop("resources", None)


def not_found_after_the_node_was_away(job: JobBuilder) -> None:
    terminated = job.pods[2]["status"]["containerStatuses"][0]["state"]["terminated"]
    terminated["reason"] = "ContainerStatusUnknown"


def stopped_by_the_kubelet(job: JobBuilder) -> None:
    job.event("Killing", "Container pytorch failed liveness probe", "Pod", "gpt-worker-2")


def evicted(job: JobBuilder) -> None:
    job.pods[2]["status"]["reason"] = "Evicted"


def disrupted(job: JobBuilder) -> None:
    job.pods[2]["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "Preempted"}]


@pytest.mark.parametrize(
    "explain", [without_limit, not_found_after_the_node_was_away, stopped_by_the_kubelet, evicted, disrupted]
)
def test_sigkill_that_something_else_explains(explain: Callable[[JobBuilder], None]) -> None:
    killed = killed_at_its_limit()
    explain(killed)
    assert killed.state().reason != "OutOfMemory"


@pytest.mark.parametrize(("processes", "who"), [(1, "rank 1 in gpt-worker-1"), (2, "gpt-worker-1")])
def test_program_that_is_not_flks(processes: int, who: str) -> None:
    text = "Traceback (most recent call last):\n  File x\nKeyError: 'y'\n"
    job = JobBuilder(processes=processes).all("pod")
    state = job.ended(0, 1, text, at=40).ended(1, 7, "earlier", at=20).condition("Failed").state()
    assert (state.code, state.failure and state.failure.exit_code) == (ExitCode.TRAINING, 7)
    assert (state.message, state.attempts) == (f"{who} ended with exit code 7: earlier", [])


def test_deadline_of_the_operator() -> None:
    message = "Job gpt has failed because it was active longer than specified deadline"
    state = JobBuilder().condition("Failed", message).state()
    assert (state.phase, state.code, state.reason) == (Phase.FAILED, ExitCode.TIMEOUT, "DeadlineExceeded")
    assert state.failure is None  # nobody has recorded one
    job = JobBuilder().all("pod").condition("Failed", message)
    state = job.ended(0, 143, JobRecord("running", 0, attempts=[Attempt(0, NOW - 60)]).to_json()).state()
    assert (state.reason, state.failure) == ("DeadlineExceeded", None)
    assert [(attempt.outcome, attempt.cause) for attempt in state.attempts] == [("failed", state.message)]


def test_pods_that_are_gone_are_in_the_operators_events() -> None:
    gone = JobBuilder().condition("Failed", "job is failing")
    gone.event("Error", "Error pod gpt-worker-1 container pytorch exitCode: 3 terminated message: it\nbroke\n")
    state = gone.state()
    assert state.message == "gpt-worker-1 ended with exit code 3: broke"
    assert state.code == ExitCode.TRAINING


def test_deleted() -> None:
    running = JobBuilder().all("pod").state()
    state = states.deleted(running)
    assert (state.phase, state.code) == (Phase.DELETED, ExitCode.CANCELLED)
    assert "another job has its name" in states.deleted(running, name_reused=True).message


def test_what_has_ended_stays_ended_when_it_is_deleted() -> None:
    ended = JobBuilder().all("ended", 0).state()
    assert states.deleted(ended) == ended


def test_json_has_a_schema_and_only_plain_data() -> None:
    data = JobBuilder().all("ended", 100, record(RAISED).to_json()).condition("Failed").state().to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["schema"] == "flk.dev/state/v1"
    assert data["phase"] == "Failed"
    assert data["failure"]["summary"] == "rank 2 in gpt-worker-2 raised ValueError: bad shard"


@pytest.mark.parametrize("empty", [{}, {"spec": {}}, {"spec": {"pytorchReplicaSpecs": {"Worker": {}}}}])
def test_sparse_objects_are_no_crash(empty: dict[str, Any]) -> None:
    job = {"metadata": {"name": "x"}, **empty}
    assert states.derive(JobView(Observation(job, [{"metadata": {"name": "p"}}], NOW))).phase in (
        Phase.STUCK,
        Phase.PENDING,
    )


@pytest.mark.promise("Causes: A node, a device or an operator in trouble is named before the script is blamed")
def test_a_pod_that_the_node_controller_has_marked_does_not_run() -> None:
    """As recorded from a node whose kubelet was stopped: phase and containers stay as they were seen last."""
    marked = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    state = JobBuilder().all("pod").pod(1, node="node-b", conditions=marked).condition("Running").state()
    assert state.cause is not None
    assert (state.cause.code, state.pods[1].phase) == ("NodeLost", "Unknown")
    assert "gpt-worker-1: node node-b does not answer" in state.message
    probe = [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]
    assert JobBuilder().all("pod", conditions=probe).condition("Running").state().cause is None


def test_a_success_of_ranks_that_never_met_has_a_warning() -> None:
    job = JobBuilder(2).condition("Succeeded")
    told = replace(record(None), alone=2)
    state = job.all("ended", 0, told.to_json()).state()
    assert state.phase == Phase.SUCCEEDED
    assert state.warning.startswith("2 ranks ended and none opened a process group")
    assert JobBuilder(2).condition("Succeeded").all("ended", 0, record(None).to_json()).state().warning == ""
