"""Elastic jobs and spares with real launchers: pods that leave, come back and are lost, and the samples of an epoch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import pytest

from flk_runtime.contract import ExitCode
from tests.support.elastic import SAMPLES, TRAIN, last_step, samples_by_step
from tests.support.pods import END, Pods

Start = Callable[..., Pods]


@pytest.fixture
def train(forked_pods: Callable[..., Pods]) -> Start:
    """Starts a job that trains for some epochs and writes down which samples each step has taken."""

    def start(pods: int, *, pause: float = 0.05, epochs: int = 1, only: int | None = None, **variables: str) -> Pods:
        settings = {"FLK_SAVE_EVERY": "10", "FLK_GRACE": "60", "FLK_RESTARTS": "0"}
        job = forked_pods(pods, 1, script=TRAIN, **settings | variables)
        job.variables["FLK_CHECKPOINT"] = str(job.folder / "checkpoint")
        begin(job, pause, epochs, only)
        return job

    return start


def begin(job: Pods, pause: float = 0.05, epochs: int = 1, only: int | None = None) -> None:
    job.start("train.py", str(job.folder), str(pause), str(epochs), only=only)


def reached(job: Pods, step: int) -> None:
    job.until(lambda: last_step(job.folder) >= step, f"the job reaches step {step}")


def sizes(job: Pods) -> list[str]:
    """Ranks and first step of each attempt, as rank 0 prints them."""
    return re.findall(r"\[rank 0\] (\d of \d ranks from step \d+)", job.log(0))


def held_out(job: Pods) -> float:
    """The loss on samples that were not trained on, at the end of the latest run."""
    return float(re.findall(r'"held_out": ([\d.e-]+)', job.log(0))[-1])


def causes(job: Pods) -> list[str]:
    return [attempt.failure.summary for attempt in job.record(0).attempts if attempt.failure]


def every_sample_once(job: Pods) -> bool:
    steps = samples_by_step(job.folder)
    assert all(len(taken) == 8 for taken in steps.values())  # the global batch of four ranks
    return sorted(i for taken in steps.values() for i in taken) == list(range(SAMPLES))


@pytest.mark.promise("Recovery: An elastic job trains each sample once while pods leave and join")
def test_pods_leave_and_join_and_every_sample_of_the_epoch_is_taken_once(train: Start) -> None:
    job = train(4, pause=0.1, FLK_MIN_PODS="2", FLK_DISRUPTIONS="0")
    reached(job, 10)
    job.running[3].terminate()
    assert job.running[3].wait(END) == ExitCode.PREEMPTED, job.logs_of_all()
    reached(job, 30)
    begin(job, only=3)
    job.until(lambda: len(sizes(job)) == 3, "pod 3 is admitted")
    reached(job, last_step(job.folder) + 3)
    for pod in (1, 2):
        job.running[pod].terminate()
    for pod in (1, 2):
        assert job.running[pod].wait(END) == ExitCode.PREEMPTED, job.logs_of_all()
    assert [job.running[pod].wait(END) for pod in (0, 3)] == [0, 0], job.logs_of_all()
    assert every_sample_once(job)
    assert [size.partition(" ranks")[0] for size in sizes(job)][:3] == ["4 of 4", "3 of 4", "4 of 4"]
    assert [size.partition(" ranks")[0] for size in sizes(job)][-1] == "2 of 4"
    record = job.record(0)
    assert (record.restarts, record.disruptions) == (0, 0)
    assert [attempt.pods for attempt in record.attempts][:3] == ["0-3", "0-2", "0-3"]
    assert record.attempts[-1].pods == "0,3"
    assert re.fullmatch(r"test-worker-3 received SIGTERM; saved after step \d+", causes(job)[0])
    assert re.fullmatch(r"test-worker-3 joined: 3 → 4 pods; saved after step \d+", causes(job)[1])
    loss = held_out(job)
    shutil.rmtree(job.folder / "checkpoint")
    begin(job, pause=0.0)  # with all four pods, from the first step to the last
    assert job.wait() == [0, 0, 0, 0], job.logs_of_all()
    assert sizes(job)[-1] == "4 of 4 ranks from step 0"
    assert loss == pytest.approx(held_out(job), rel=0.01)


@pytest.mark.promise("Recovery: An elastic job trains each sample once while pods leave and join")
def test_a_lost_pod_is_not_waited_for_longer_than_the_last_call(train: Start) -> None:
    job = train(3, FLK_MIN_PODS="2")
    job.until((job.folder / "checkpoint" / "latest").exists, "a checkpoint is stored")
    job.running[2].kill()
    job.until(lambda: re.search("2 of 3 ranks from step [1-9]0", job.log(0)), "the job goes on with two pods")
    begin(job, only=2)
    assert job.wait() == [0, 0, 0], job.logs_of_all()
    steps = samples_by_step(job.folder)
    assert sorted(i for taken in steps.values() for i in taken) == list(range(SAMPLES))
    record = job.record(0)
    assert (record.restarts, record.disruptions) == (0, 1)
    assert causes(job)[0] == "test-worker-2 lost the connection to pod 0: it closed the connection"


@pytest.mark.soak
def test_a_job_starts_with_what_is_there_and_admits_the_others(train: Start) -> None:
    job = train(3, only=0, pause=0.2, FLK_MIN_PODS="1")  # so that it still trains when the others have started
    job.until(lambda: "1 of 3 ranks from step 0" in job.log(0), "the job starts with one pod")
    for pod in (1, 2):
        begin(job, only=pod)
    job.until(lambda: "3 of 3 ranks" in job.log(0), "the job has three pods")
    assert job.wait() == [0, 0, 0], job.logs_of_all()
    steps = samples_by_step(job.folder)
    assert sorted(i for taken in steps.values() for i in taken) == list(range(SAMPLES))


@pytest.mark.promise("Recovery: An elastic job trains each sample once while pods leave and join")
def test_a_spare_takes_the_ranks_of_a_killed_pod_which_is_the_spare_when_it_is_back(train: Start) -> None:
    job = train(3, FLK_SPARES="1", FLK_RESTARTS="0")
    reached(job, 15)
    first, second = (int(pod) for pod in re.findall(r"\d", _pods_of_first_attempt(job)))
    (spare,) = {0, 1, 2} - {first, second}
    job.running[second].kill()
    job.until(lambda: len(sizes(job)) == 2, "the spare takes part")
    begin(job, only=second)
    assert job.wait() == [0, 0, 0], job.logs_of_all()
    assert [attempt.pods.replace("-", ",") for attempt in job.record(0).attempts] == ["0," + str(second), f"0,{spare}"]
    assert "[rank 1]" not in job.logs[second][-1].read_text()
    steps = samples_by_step(job.folder)
    assert sorted(i for taken in steps.values() for i in taken) == list(range(SAMPLES))


def _pods_of_first_attempt(job: Pods) -> str:
    match = re.search(r'"pods":"([^"]+)"', job.log(0))
    assert match
    return match[1]
