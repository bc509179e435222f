"""Commands that end all pods of a job whose checkpoints only their memory has: refused, asked, or told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk.jobs.lifecycle.suspension import loses_checkpoints, lost_with_pods
from flk.manifest import make_bundle, render
from flk.spec.job import validated
from flk.targets import TARGETS
from flk_runtime.contract.pod_layout import CHECKPOINT_FOLDER
from flk_runtime.contract.record import Goodput, JobRecord
from tests.support.api_server import JOBS, PODS
from tests.support.commands import Run
from tests.support.jobs import NOW, JobBuilder, record

LOST = (
    "job gpt is at step 190, and its newest checkpoint, of step 120, is only in the memory of its pods, which ends "
    "with them"
)
AGAIN = f"{LOST}: it starts again at step 0, unless its script saves elsewhere"
RECORD: JobRecord = replace(record(None, None, outcome="running"), saved=120)
STEP = '[rank 0] {"step": 190, "loss": 2.5}'


def in_memory(name: str = "gpt") -> JobBuilder:
    job = JobBuilder(2, name=name)
    job.container["env"] = [{"name": "FLK_CHECKPOINT", "value": CHECKPOINT_FOLDER}]
    job.container["volumeMounts"] = [{"name": "checkpoint", "mountPath": CHECKPOINT_FOLDER}]
    template = job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    template["spec"]["volumes"] = [{"name": "checkpoint", "emptyDir": {}}]
    return job.condition("Running")


@pytest.fixture
def training(fake: Any) -> Any:
    """A job that has told of its checkpoint and of a later step, beside one with a volume."""
    in_memory().all("pod").add_to(fake)
    JobBuilder(1, name="stored").add_to(fake)
    fake.written["gpt-worker-0"] = f"[pod 0] flk-record {RECORD.to_json()}\n{STEP}\n"
    return fake


def suspended(fake: Any, name: str = "gpt") -> bool:
    return bool(fake.objects[JOBS][name]["spec"]["runPolicy"].get("suspend"))


@pytest.mark.parametrize("target", TARGETS)
def test_checkpoints_end_with_the_pods_of_each_target_unless_they_have_a_volume(target: str, tmp_path: Path) -> None:
    job = validated({"command": "train.py", "name": "gpt", "ship": False, "target": target})
    for made, loses in ((job, True), (job.changed(checkpoint="pvc:/ck"), False)):
        assert loses_checkpoints(render(made, make_bundle(made, tmp_path), namespace="team")[0]) is loses


@pytest.mark.parametrize("command", ["restart", "suspend"])
def test_a_job_loses_nothing_without_a_word(training: Any, run: Run, command: str) -> None:
    code, _, stderr = run(command, "gpt")
    assert (code, suspended(training)) == (2, False)
    assert f"error: {AGAIN}\nhint: --lose-progress ends them all the same; " in stderr
    training.objects[PODS].clear()
    in_memory().all("pod").add_to(training)
    code, _, stderr = run(command, "gpt", "--lose-progress", "--timeout", "1s")
    assert (code, suspended(training)) == (124, True)
    assert f"flk: {AGAIN}\n" in stderr


@pytest.mark.parametrize(("loses", "told"), [(True, 1), (False, 0)])
def test_a_job_that_has_ended_says_that_it_begins_anew(fake: Any, run: Run, loses: bool, told: int) -> None:
    job = in_memory() if loses else JobBuilder(2)
    job.condition("Succeeded").add_to(fake)
    code, _, stderr = run("restart", "gpt")
    assert code == 0, stderr
    assert stderr.count("in the memory of its pods, which have ended: it starts again at step 0, unless") == told


def test_several_pods_of_an_elastic_job_are_not_taken_away_without_a_word(training: Any, run: Run) -> None:
    job = training.objects[JOBS]["gpt"]
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 4
    container["env"] += [{"name": "FLK_MIN_PODS", "value": "1"}, {"name": "FLK_PODS", "value": "4"}]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    code, _, stderr = run("scale", "gpt", "2")
    assert (code, worker["replicas"]) == (2, 4)
    assert f"error: {AGAIN}\nhint: --lose-progress ends them all the same; " in stderr
    for pods, options in ((3, []), (1, ["--lose-progress"])):
        assert run("scale", "gpt", str(pods), *options)[0] == 0
        assert training.objects[JOBS]["gpt"]["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == pods


@pytest.mark.parametrize("which", [["gpt", "stored"], ["-l", "flk.dev/job"]])
def test_of_several_jobs_only_those_are_refused_that_lose_something(training: Any, run: Run, which: list[str]) -> None:
    code, _, stderr = run("suspend", *which)
    assert (code, suspended(training), suspended(training, "stored")) == (2, False, True)
    assert LOST in stderr


def test_a_deletion_says_what_it_ends_and_does_not_ask(training: Any, run: Run) -> None:
    code, stdout, stderr = run("delete", "gpt", "stored", "--no-wait")
    assert (code, stdout.split()) == (0, ["gpt", "stored"])
    assert stderr.count(LOST) == 1
    assert "stored" not in stderr


def test_what_cannot_be_read_may_be_lost(training: Any, run: Run) -> None:
    training.refused[f"{PODS}/gpt-worker-0/log"] = 403, "pods/log is forbidden"
    code, _, stderr = run("restart", "gpt")
    assert (code, suspended(training)) == (2, False)
    assert "how far it is cannot be read: " in stderr


def test_nothing_is_lost_of_a_job_that_has_ended_or_told_no_step() -> None:
    told = {"record": RECORD}
    ended = in_memory().all("ended", 0).condition("Succeeded")
    suspended, running, waiting = in_memory().all("pod"), in_memory().all("pod"), in_memory().all("pod", "Pending", {})
    suspended.job["spec"]["runPolicy"]["suspend"] = True
    for job in (ended, suspended, waiting):
        job.record = RECORD
        assert lost_with_pods(job.view()) == ""
    assert lost_with_pods(running.view()) == ""
    running.record = told["record"]
    assert lost_with_pods(running.view()).startswith("job gpt is at step 120, and its newest checkpoint, of step 120")
    running.record = replace(RECORD, goodput=Goodput(NOW - 50, {}))
    assert ", of step 120 as of 50s ago, is only in the memory" in lost_with_pods(running.view())
