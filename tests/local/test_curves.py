"""Curves in TensorBoard, MLflow and W&B through killed ranks, lost pods and resumes, with the real packages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support.curves import (
    TRAIN,
    Point,
    last,
    mlflow_points,
    printed,
    tensorboard_points,
    wandb_points,
)
from tests.support.install import cache, pip_install
from tests.support.memory import delete_pods
from tests.support.pods import Pods
from tests.support.ports import held_ports
from tests.support.processes import until
from tests.support.requirements import unavailable

END = "1000000"  # steps


@pytest.fixture
def sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a job with all sinks, whose data is below the folder of the test."""
    variables = {
        user_env.METRICS: f"tensorboard:{tmp_path}/tb,mlflow,wandb",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path / "wb"),
        "WANDB_PROJECT": "curves",
    }
    for name in ("MLFLOW_ALLOW_FILE_STORE",):
        monkeypatch.setenv(name, variables[name])
    return variables


@pytest.fixture
def job(forked_pods: Callable[..., Pods], root: Path, sinks: dict[str, str]) -> Callable[..., Pods]:
    def make(pods: int = 2, **variables: str) -> Pods:
        settings = {pod_env.MEMORY_ROOT: str(root), user_env.LEASE: "3", pod_env.JOB_UID: "one", pod_env.RESTARTS: "3"}
        return forked_pods(pods, 1, script=TRAIN, **{**settings, **sinks, **variables})

    return make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of an MLflow server with a database, whose package has half a gigabyte of dependencies."""
    packages = cache() / f"mlflow-{version('mlflow-skinny')}"
    if not packages.exists() and (reason := pip_install(packages, f"mlflow=={version('mlflow-skinny')}")):
        unavailable(f"MLflow's server: {reason}")
    with held_ports() as hold, (tmp_path / "server.log").open("w") as log:
        address = f"http://127.0.0.1:{hold()}"
        words = ("--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--workers", "1")
        place = ("--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", str(tmp_path))
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words, *place],
            env={**os.environ, "PYTHONPATH": str(packages)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            try:
                return bool(urllib.request.urlopen(f"{address}/health", timeout=5).status == 200)
            except OSError:
                return False

        try:
            until(answers, "the server answers", seconds=300)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def assert_curves(folder: Path, lines: list[dict[Point, float]], mlflow: str = "", lost: int = 0) -> None:
    """Assert that each sink has one run with the values that were printed.

    TensorBoard has those of the last attempt that did a step, the others those of any attempt, whose line may be lost
    with its launcher: only what does not depend on the attempt is compared then. All may lack so many steps from before
    a pod was ``lost``: they are written a moment later.
    """
    expected = last(lines)
    (curve,) = tensorboard_points(folder / "tb").values()
    assert len({step for _, step in expected.keys() - curve.keys()}) <= lost
    assert curve == pytest.approx({point: expected[point] for point in curve}, rel=1e-6)
    (curve,) = mlflow_points(mlflow or (folder / "mlruns").as_uri()).values()
    assert len({step for _, step in expected.keys() - curve.keys()}) <= lost
    assert [p for p in curve if p[0] in ("loss", "part/a") and curve[p] != expected[p]] == []
    assert [p for p in curve if p[0] in ("attempt", "val") and curve[p] > expected[p]] == []
    (curve,) = wandb_points(folder / "wb").values()
    assert [p for p in curve if p[0] in ("loss", "part/a") and curve[p] != expected[p]] == []
    assert len({step for _, step in expected.keys() - curve.keys()}) <= lost


def step_of(folder: Path) -> int:
    """The step that rank 0 has done; 0 before the first one, and while it writes its number."""
    return int((folder / "step.0").read_text() or 0) if (folder / "step.0").exists() else 0


def reach_sinks(run: Pods, folder: Path, step: int, mlflow: str = "") -> None:
    """Wait until the sinks have what was printed up to ``step`` or later, some steps before the next evaluation."""

    def done() -> bool:
        now = step_of(folder)
        if now < step or now % 10 not in (4, 5, 6, 7):
            return False
        evaluation = ("val", now // 10 * 10)
        address = mlflow or (folder / "mlruns").as_uri()
        try:
            curves = [*mlflow_points(address).values(), *wandb_points(folder / "wb").values()]
        except AttributeError:  # MLflow reads a file that rank 0 just writes
            return False
        # Reading takes a second or more where the machine is busy: an evaluation of just now may be lost.
        still = step_of(folder) // 10 == now // 10
        return still and len(curves) == 2 and all(evaluation in curve for curve in curves)

    run.until(done, f"the sinks have step {step}")


@pytest.mark.promise("Extensions: TensorBoard, MLflow and W&B have one curve through faults")
def test_a_killed_rank_and_a_lost_pod_leave_one_curve(job: Callable[..., Pods], root: Path, tmp_path: Path) -> None:
    run = job()
    run.start("train.py", END, "0.1")
    reach_sinks(run, tmp_path, 10)
    os.kill(run.pid(0, 0), signal.SIGKILL)
    run.pid(1, 0)
    reach_sinks(run, tmp_path, step_of(tmp_path) + 10)
    delete_pods(run, root, 0)
    run.start("train.py", END, "0.1", only=0)
    assert run.wait() == [0, 0], run.logs_of_all()
    lines = printed(run.log(0))
    assert len(lines) > len({step for line in lines for _, step in line}), "steps were done again"
    assert run.log(0).count("resumed at step") == 2
    assert_curves(tmp_path, lines, lost=10)


@pytest.mark.promise("Extensions: TensorBoard, MLflow and W&B have one curve through faults")
def test_a_job_that_resumes_from_the_checkpoint_of_another_goes_on_with_its_run(
    job: Callable[..., Pods], tmp_path: Path
) -> None:
    place = {user_env.CHECKPOINT: str(tmp_path / "checkpoints")}
    one = job(1, **place)
    one.start("train.py", "20", "0")
    assert one.wait() == [0], one.log()
    lines = printed(one.log())  # the second job writes to the same file
    two = job(1, **place, **{pod_env.JOB_UID: "two", user_env.JOB: "other"})
    two.start("train.py", "31", "0")
    assert two.wait() == [0], two.log()
    assert "resumed at step 20" in two.log()
    assert_curves(tmp_path, lines + printed(two.log()))


def test_a_preempted_job_has_all_its_lines_in_the_sinks(job: Callable[..., Pods], tmp_path: Path) -> None:
    run = job(1)
    run.start("train.py", END, "0.1")
    reach_sinks(run, tmp_path, 10)
    run.running[0].terminate()
    assert run.wait() == [143], run.log()
    if "not all is written after 5 s" in run.log():  # a stop waits no longer for a sink, and says so
        pytest.skip("this machine was too busy to write the last lines in the time of a stop")
    assert_curves(tmp_path, printed(run.log()))


CANARY = "canary-of-a-secret"


@pytest.mark.promise("Clusters: No secret is printed, logged or kept")
def test_no_secret_of_the_environment_or_the_arguments_is_written(job: Callable[..., Pods], tmp_path: Path) -> None:
    """Nor what the script prints and logs of them. The address of MLflow's files has no password."""
    run = job(1, MY_TOKEN=CANARY, WANDB_API_KEY=f"{CANARY}{'0' * 40}")
    run.start("train.py", "12", "0", f"--token={CANARY}")
    assert run.wait() == [0], run.log()
    assert_curves(tmp_path, printed(run.log()))
    written = [path for name in ("tb", "mlruns", "wb") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert len(written) > 10
    written += [tmp_path / "log.0.0", tmp_path / "termination.0"]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert "[rank 0] logged in with *** --token=***\n" in run.log()


@pytest.mark.promise("Extensions: TensorBoard, MLflow and W&B have one curve through faults")
def test_sinks_that_are_away_do_not_end_the_training(job: Callable[..., Pods], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    away = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    run = job(1, **away, **{user_env.METRICS: f"tensorboard:{tmp_path}/file,mlflow"})
    run.start("train.py", "20", "0")
    assert run.wait() == [0], run.log()
    assert run.log().count("flk tries again, and training goes on") == 2, run.log()
    assert run.log().count("lines of metrics may be missing, steps ") == 2, run.log()
