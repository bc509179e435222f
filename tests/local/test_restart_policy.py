"""The restart policy with real launchers: what is final, what is retried, what it uses, and who replaces a pod."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flk_runtime.contract import ExitCode
from flk_runtime.contract.record import JobRecord
from tests.support.collection import often
from tests.support.pods import END, Pods

STEPS = """
    import errno, os, pathlib, resource, signal, socket, sys, time
    from flk_runtime.shared import progress

    attempt, rank = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])

    def step(number):
        progress.own_page().record_step(number)

    def fail():
        {fault}

    step({step})
    if rank == 1:
        fail()
    time.sleep(600)
"""


def run(job: Pods) -> JobRecord:
    """Run two pods of one rank each until their end. Both know the same record."""
    job.start("train.py")
    codes = job.wait()
    records = [job.record(pod) for pod in range(2)]
    assert [record.code for record in records] == codes, job.logs_of_all()
    assert records[0].no_retry_reason == records[1].no_retry_reason
    return records[0]


@pytest.mark.promise("Recovery: Failures use a budget, and the same one twice without progress is final")
def test_the_second_restart_in_a_row_waits_and_the_third_longer(forked_pods: Callable[..., Pods]) -> None:
    fault = "os.kill(os.getpid(), signal.SIGKILL)"
    record = run(forked_pods(2, 1, script=STEPS.format(fault=fault, step=0), FLK_RESTARTS="3", FLK_BACKOFF="1.5"))
    ended = [attempt.ended or 0.0 for attempt in record.attempts]
    pauses = [later.started - end for later, end in zip(record.attempts[1:], ended, strict=False)]
    assert pauses[1] >= 0.99
    assert pauses[2] >= 1.49


TRAIN_UNTIL = """
    import os, pathlib, sys, time
    from flk_runtime.shared import progress
    attempt, rank = int(os.environ["FLK_ATTEMPT"]), int(os.environ["RANK"])
    progress.own_page().record_step(attempt + 1)
    pathlib.Path(f"pid.{attempt}.{rank}").write_text(str(os.getpid()))
    if attempt in (1, 3) and rank == 1:
        raise [ValueError, KeyError][attempt // 2]("bad sample")
    while attempt < 4:
        time.sleep(0.01)
"""


KEEP_TRAINING = """
    import os, pathlib, time
    from flk_runtime.shared import progress
    progress.own_page().record_step(7)
    pathlib.Path(f"pid.{os.environ['FLK_ATTEMPT']}.{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.promise("Recovery: Failures use a budget, and the same one twice without progress is final")
def test_both_counts_survive_the_loss_of_pod_0(forked_pods: Callable[..., Pods]) -> None:
    job = forked_pods(2, 1, script=TRAIN_UNTIL, FLK_RESTARTS="2", FLK_DISRUPTIONS="2")
    job.start("train.py")
    for attempt in (0, 2):  # attempts 1 and 3 fail by themselves
        job.pid(attempt, 0)
        job.pid(attempt, 1)
        job.running[0].kill()
        job.running[0].wait()
        job.start("train.py", only=0)
    assert job.wait() == [0, 0], job.logs_of_all()
    record = job.record(0)
    assert (record.restarts, record.disruptions) == (2, 2)
    assert (record.max_restarts, record.max_disruptions) == (2, 2)
    assert [attempt.number for attempt in record.attempts] == [0, 1, 2, 3, 4]


@pytest.mark.promise("Recovery: A container that exceeds its memory limit says so")
@pytest.mark.parametrize("victim", often((0,), [1, 0]))
def test_a_container_that_is_killed_twice_at_one_step_ends_the_job(
    forked_pods: Callable[..., Pods], victim: int
) -> None:
    """The kernel kills all processes of a container at its memory limit, under control groups v2: the launcher too."""
    job = forked_pods(2, 1, script=KEEP_TRAINING)
    job.start("train.py")
    for attempt in (0, 1):
        if attempt:
            job.start("train.py", only=victim)
        job.pid(attempt, 0)
        job.pid(attempt, 1)
        job.running[victim].kill()
        job.running[victim].wait()
    job.start("train.py", only=victim)
    assert job.wait() == [ExitCode.INFRASTRUCTURE] * 2, job.logs_of_all()
    record = job.record(1)
    assert record.failure is not None
    assert (record.failure.kind, record.failure.pod, len(record.attempts)) == ("container_killed", victim, 2)
    assert record.no_retry_reason == "not retried: failed twice at step 7 with the same error"


def test_the_pod_of_a_lost_gpu_is_replaced(forked_pods: Callable[..., Pods]) -> None:
    fault = "raise RuntimeError('CUDA error: uncorrectable ECC error encountered') if attempt == 0 else SystemExit"
    script = STEPS.format(fault=fault, step=7).replace("time.sleep(600)", "time.sleep(600 if attempt == 0 else 0)")
    job = forked_pods(2, 1, script=script, FLK_DISRUPTIONS="1")
    job.start("train.py")
    assert job.running[1].wait(END) == ExitCode.UNUSABLE
    assert job.record(1).outcome == "replaced"
    job.start("train.py", only=1)
    assert job.wait() == [0, 0], job.logs_of_all()
    first = job.record(0).attempts[0].failure
    assert first is not None
    assert (first.kind, first.rank) == ("gpu", 1)
    assert (job.record(0).restarts, job.record(0).disruptions) == (0, 1)
