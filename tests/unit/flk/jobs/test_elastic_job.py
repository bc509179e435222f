"""Elastic jobs and spares in the client: what a job may say, its manifest, its state, and `flk scale`."""

from __future__ import annotations

from typing import Any

import pytest

from flk import Job
from flk.errors import ApiError, UsageError
from flk.jobs.logs.lines import LineFilter, LogOptions
from flk.jobs.state import Phase, derive
from flk.manifest import render
from flk.manifest.bundle import Bundle
from flk.observe.client import JobClient
from flk.observe.reader import pod_of_rank
from flk.spec.job import validated
from flk.spec.labels import QUEUE
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.log_format import RECORD_MARKER
from flk_runtime.contract.record import Attempt, JobRecord
from tests.support.api_server import JOBS
from tests.support.commands import Run
from tests.support.jobs import MADE, NOW, JobBuilder

NOTHING = Bundle()


def job(**fields: Any) -> Job:
    return validated({"name": "gpt", "command": ["train.py"], **fields})


def elastic(replicas: int = 4) -> JobBuilder:
    builder = JobBuilder(replicas=replicas)
    builder.container["env"] = [{"name": "FLK_PODS", "value": "4"}, {"name": "FLK_MIN_PODS", "value": "2"}]
    return builder


def test_an_elastic_job_has_all_its_pods_unless_it_says_otherwise() -> None:
    for given in ("2:4", {"min": 2, "max": 4}):
        assert (job(elastic=given).replicas, job(elastic=given).most_pods) == (4, 4)
    assert job(elastic="2:4", replicas=3).replicas == 3
    assert job(elastic="2:4").changed(save_every=5).replicas == 4
    assert (job(replicas=4, spares=2).created_pods, job(replicas=4, spares=2).most_pods) == (6, 6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"elastic": "4"}, "elastic: must be MIN:MAX, two numbers of pods (is '4')"),
        ({"elastic": "4:2"}, "elastic: min is 4, more than max, which is 2"),
        ({"elastic": "0:2"}, "elastic.min: must be at least 1"),
        ({"elastic": "2:4", "replicas": 5}, "replicas: must be from 2 to 4 in this elastic job (is 5)"),
        ({"elastic": {"min": 2, "max": 4, "batch": "half"}}, "elastic.batch: must be one of keep, scale (is 'half')"),
        ({"elastic": "2:4", "spares": 1}, "spares: an elastic job goes on with fewer pods, so it has none"),
        ({"spares": -1}, "spares: must be at least 0"),
    ],
)
def test_what_no_job_can_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        job(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "pods", "variables", "policy"),
    [
        (
            {"elastic": "2:4", "replicas": 3},
            3,
            {"FLK_PODS": "4", "FLK_MIN_PODS": "2", "FLK_BATCH": "keep"},
            {"minReplicas": 2, "maxReplicas": 4},
        ),
        (
            {"replicas": 4, "spares": 1},
            5,
            {"FLK_PODS": "5", "FLK_SPARES": "1"},
            {"minReplicas": 5, "maxReplicas": 5},
        ),
    ],
)
def test_the_manifest_of_a_job_that_is_elastic_or_has_a_spare_creates_its_pods_and_names_its_limits(
    fields: dict[str, Any], pods: int, variables: dict[str, str], policy: dict[str, int]
) -> None:
    manifest = render(job(**fields), NOTHING)[0]
    worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    env = {each["name"]: each.get("value") for each in worker["template"]["spec"]["containers"][0]["env"]}
    assert worker["replicas"] == pods
    assert env.items() >= variables.items()
    assert ("FLK_MIN_PODS" in env) is ("elastic" in fields)
    assert manifest["spec"]["elasticPolicy"] == policy


def record(*attempts: Attempt) -> JobRecord:
    return JobRecord("running", 0, attempts=list(attempts))


@pytest.mark.parametrize(("running", "phase"), [((0, 1), Phase.PENDING), ((1, 2), Phase.STUCK), ((0,), Phase.STUCK)])
def test_a_job_is_not_stuck_while_enough_of_its_pods_run(running: tuple[int, ...], phase: Phase) -> None:
    """The first attempt needs pod 0, and two pods."""
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": MADE}
    message = "0/3 nodes are available: 3 node(s) didn't match pod anti-affinity rules."
    builder = elastic()
    for index in range(4):
        if index in running:
            builder.pod(index)
        else:
            builder.pod(index, "Pending", node="", conditions=[{**said, "message": message}])
    assert derive(builder.view()).phase == phase


@pytest.mark.parametrize("target", ["job", "jobset"])
@pytest.mark.parametrize(("fields", "ends"), [({"elastic": "1:4"}, True), ({"spares": 1}, True), ({}, False)])
def test_a_job_of_kubernetes_ends_with_its_first_pod_where_others_need_not_train(
    fields: Any, ends: bool, target: str
) -> None:
    spec = render(job(target=target, replicas=2, **fields), NOTHING)[0]["spec"]
    spec = spec["replicatedJobs"][0]["template"]["spec"] if target == "jobset" else spec
    assert spec.get("successPolicy") == ({"rules": [{"succeededIndexes": "0"}]} if ends else None)


@pytest.mark.parametrize(("option", "fields"), [("--elastic", {"elastic": "1:4"}), ("--spares", {"spares": 1})])
def test_a_trainjob_needs_all_its_pods_and_the_refusal_says_whose_that_is(option: str, fields: Any) -> None:
    with pytest.raises(UsageError) as error:
        render(job(target="trainjob", replicas=2, **fields), NOTHING)
    assert str(error.value).startswith(f"{option}: a TrainJob needs the success of all its pods: only its runtime")
    assert error.value.hint == "choose --target pytorchjob or --target jobset or --target job"


def test_a_job_that_trains_with_fewer_pods_is_running_and_shows_its_size() -> None:
    builder = elastic().all("pod")
    del builder.pods[1]
    left = Failure(Kind.RESIZED, 1, pod_name="gpt-worker-1", message="received SIGTERM; saved after step 9")
    builder.record = record(Attempt(0, NOW - 50, NOW - 40, left, pods="0-3"), Attempt(1, NOW - 40, pods="0,2-3"))
    state = derive(builder.view())
    assert (state.phase, state.size, state.replicas) == (Phase.RUNNING, 3, 4)
    assert (state.min_size, state.max_size, state.world_size) == (2, 4, 3)
    assert [pod.ranks for pod in state.pods] == [[0], [], [1], [2]]
    assert [(each.pods, each.outcome) for each in state.attempts] == [(4, "resized"), (3, "running")]
    assert state.attempts[0].cause == "gpt-worker-1 received SIGTERM; saved after step 9"


def test_a_spare_in_the_place_of_a_lost_pod_has_its_ranks() -> None:
    builder = JobBuilder(replicas=3, processes=2).all("pod")
    builder.container["env"] = [{"name": "FLK_PODS", "value": "3"}, {"name": "FLK_SPARES", "value": "1"}]
    builder.record = record(Attempt(1, NOW - 40, pods="0,2"))
    state = derive(builder.view())
    assert [pod.ranks for pod in state.pods] == [[0, 1], [], [2, 3]]
    assert (state.size, state.spares, state.world_size) == (2, 1, 4)


def test_scale_changes_the_replicas_within_the_limits(fake: Any, run: Run) -> None:
    elastic().add_to(fake)
    code, _, stderr = run("scale", "gpt", "3")
    assert code == 0
    assert "job gpt gets 3 pods in place of 4" in stderr
    assert fake.objects[JOBS]["gpt"]["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
    code, _, stderr = run("scale", "gpt", "3")
    assert "job gpt has 3 pods already" in stderr
    for pods in ("1", "5"):
        code, _, stderr = run("scale", "gpt", pods)
        assert code == 2
        assert f"PODS: must be from 2 to 4 for job gpt (is {pods})" in stderr
    assert len(fake.asked("PATCH")) == 1


def test_only_elastic_jobs_that_run_outside_of_queues_are_scaled(fake: Any, run: Run) -> None:
    JobBuilder().add_to(fake)
    code, _, stderr = run("scale", "gpt", "2")
    assert code == 2
    assert "job gpt is not elastic: it trains with 3 pods and no others" in stderr
    ended = elastic().condition("Succeeded")
    ended.add_to(fake)
    code, _, stderr = run("scale", "gpt", "2")
    assert code == 2
    assert "job gpt has ended (Succeeded)" in stderr
    queued = elastic()
    queued.job["metadata"]["labels"][QUEUE] = "gold"
    queued.add_to(fake)
    code, _, stderr = run("scale", "gpt", "2")
    assert code == 2
    assert "Kueue decides" in stderr
    assert fake.asked("PATCH") == []


@pytest.mark.promise("Clusters: flk exec, cp and port-forward reach the pod of a rank")
def test_commands_for_a_rank_find_its_pod_after_a_change_of_size(fake: Any, client: JobClient) -> None:
    builder = elastic().all("pod").add_to(fake)
    line = RECORD_MARKER + record(Attempt(1, NOW - 40, pods="0,2-3")).to_json()
    fake.written[builder.pods[0]["metadata"]["name"]] = f"[pod 0] {line}\n"
    assert [pod_of_rank(client, "gpt", rank).name for rank in (0, 1, 2)] == [
        "gpt-worker-0",
        "gpt-worker-2",
        "gpt-worker-3",
    ]
    with pytest.raises(ApiError, match="rank 3 is not in the latest attempt of job gpt, which has fewer pods"):
        pod_of_rank(client, "gpt", 3)
    with pytest.raises(UsageError, match="--rank: job gpt has no rank 4"):
        pod_of_rank(client, "gpt", 4)


def test_the_pods_of_ranks_are_not_guessed_before_the_first_attempt(fake: Any, client: JobClient) -> None:
    elastic().all("pod").add_to(fake)
    assert pod_of_rank(client, "gpt", 0).name == "gpt-worker-0"
    with pytest.raises(ApiError, match="which pod of job gpt has rank 1 is not known"):
        pod_of_rank(client, "gpt", 1)


def test_the_log_of_a_rank_marks_attempts_only_in_the_pods_where_it_was() -> None:
    chosen = LineFilter.of(elastic().all("pod").view(), LogOptions(ranks=frozenset({1})))
    logs = {1: ["flk-attempt 1", "rank 1", "flk-attempt 2", "rank 0"], 2: ["flk-attempt 2", "flk-attempt 3", "rank 1"]}
    shown = [
        line.text
        for pod, words in logs.items()
        for line in chosen.lines(f"gpt-worker-{pod}").chosen(
            ("", f"[pod {pod}] {word}" if word.startswith("flk") else f"[{word}] hello") for word in words
        )
    ]
    assert shown == ["[rank 1] hello", "[pod 2] attempt 3", "[rank 1] hello"]
