"""Failures on a GPU: what the launcher says of them, how the job ends, and what the next attempt finds."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from flk_runtime.contract import ExitCode, pod_env, user_env
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.record import JobRecord
from tests.support.gpu import RESTARTED, Launch, record_in, restarts, said, seen

FINAL = {pod_env.RESTARTS: "0"}


def failed(launch: Launch, folder: Path, script: str, code: ExitCode, **variables: str) -> tuple[Failure, JobRecord]:
    """The failure of a job without restarts, which ends with ``code``, and the record of the job."""
    ended = launch(RESTARTED, script, failing=True, **{**restarts(folder), **FINAL, **variables})
    assert ended.returncode == code, ended.stdout + ended.stderr
    record = record_in(folder)
    assert record.failure is not None
    print(record.failure.summary)
    return record.failure, record


def test_memory_of_the_gpu_that_is_not_there_is_the_cause(launch: Launch, tmp_path: Path) -> None:
    script = """
        with flk.init() as run:
            torch.empty(1 << 44, device=run.device)
    """
    failure, record = failed(launch, tmp_path, script, ExitCode.TRAINING)
    assert (failure.kind, failure.type) == ("exception", "OutOfMemoryError")
    assert "CUDA out of memory. Tried to allocate" in failure.summary
    assert "torch.empty(1 << 44, device=run.device)" in failure.details
    assert record.quarantine == []


# What notices the assertion that a kernel has failed: the script, or NCCL's watchdog, which aborts the process.
NOTICED = {
    "script": "torch.cuda.synchronize()",
    "collective": "dist.all_reduce(torch.ones(1, device=run.device))\n            torch.cuda.synchronize()",
    "watchdog": "dist.all_reduce(torch.ones(1, device=run.device))\n            time.sleep(20)",
}


@pytest.mark.parametrize("after", NOTICED)
def test_an_index_out_of_range_is_blamed_on_the_script(launch: Launch, tmp_path: Path, after: str) -> None:
    """The kernel fails behind the script, in an assertion on the device."""
    script = f"""
        import time

        with flk.init() as run:
            model = run.parallelize(nn.Embedding(8, 8))
            words = torch.full((4,), 99, device=run.device)
            dist.all_reduce(torch.ones(1, device=run.device))
            torch.cuda.synchronize()
            {{before}}
            model(words)
            {NOTICED[after]}
    """
    # The watchdog asks for a collective that waits when the kernel fails.
    before = "torch.cuda._sleep(1 << 29)" if after == "watchdog" else "pass"
    failure, record = failed(launch, tmp_path, script.replace("{before}", before), ExitCode.TRAINING)
    assert not failure.secondary
    assert not failure.kind.suspicious
    assert record.quarantine == []
    assert "CUDA error: device-side assert triggered" in failure.summary
    if failure.kind == "exception":
        assert failure.type in ("AcceleratorError", "DistBackendError")
        assert "train.py" in failure.details
    else:
        assert (failure.kind, failure.signal) == ("signal", signal.SIGABRT)
        assert after != "script"  # the watchdog may be faster than the collective's exception


def test_a_rank_that_is_killed_while_a_kernel_runs_starts_again(launch: Launch, tmp_path: Path) -> None:
    script = """
        with flk.init(log_every=0) as run:
            total = torch.ones(1, device=run.device)
            dist.all_reduce(total)
            torch.cuda.synchronize()
            if ATTEMPT == 0:
                torch.cuda._sleep(1 << 42)  # for some forty minutes
                kill()
            dist.all_reduce(total)
            run.log(total=total, attempt=ATTEMPT)
    """
    found = said(launch(RESTARTED, script, **restarts(tmp_path)))
    assert (found["total"], found["attempt"]) == (1.0, 1)
    killed = record_in(tmp_path).attempts[0].failure
    assert killed is not None
    assert (killed.kind, killed.signal) == ("killed", signal.SIGKILL)


def test_sigterm_while_kernels_run_saves_what_they_compute(launch: Launch, tmp_path: Path) -> None:
    script = """
        def parent(process):
            with open(f"/proc/{process}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])

        with flk.init(save_every=0, log_every=0) as run:
            model = noisy()
            model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters(), fused=True))
            begun = run.steps
            while not begun:
                if run.steps == 3:
                    os.kill(parent(os.getppid()), signal.SIGTERM)  # the launcher's, as the kubelet sends it
                torch.cuda._sleep(1 << 28)  # a sixth of a second
                loss = loss_of(model, torch.randn(64, 256, device=run.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                try:
                    run.step()
                except SystemExit:
                    note("saved", [run.steps, *digest(model, optimizer)])
                    raise
            note("found", [run.steps, *digest(model, optimizer)])
    """
    variables = {**restarts(tmp_path, checkpoint=tmp_path / "checkpoint")}
    ended = launch(RESTARTED, script, failing=True, **variables)
    assert ended.returncode == ExitCode.PREEMPTED, ended.stdout + ended.stderr
    failure = record_in(tmp_path).failure
    assert failure is not None
    steps = seen(tmp_path, 0)["saved"][0]
    assert steps >= 4
    assert failure.message == f"received SIGTERM; saved after step {steps}"
    launch(RESTARTED, script, **variables)
    noted = seen(tmp_path, 0)
    assert noted["found"] == noted["saved"]


def test_a_rank_that_is_stopped_while_a_kernel_runs_is_a_hang(launch: Launch, tmp_path: Path) -> None:
    script = """
        with flk.init(log_every=0) as run:
            model = run.parallelize(nn.Linear(8, 8))
            for step in range(2):
                model(torch.ones(2, 8, device=run.device)).sum().backward()
                run.step()
            torch.cuda._sleep(1 << 32)
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    limit = {user_env.HANG_TIMEOUT: "8", pod_env.GRACE: "2"}
    failure, _ = failed(launch, tmp_path, script, ExitCode.INFRASTRUCTURE, **limit)
    assert (failure.kind, failure.rank) == ("hang", 0)
    assert "is stopped (SIGSTOP)" in failure.summary
