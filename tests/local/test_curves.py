"""Curves in TensorBoard, MLflow and W&B through killed ranks, lost pods and resumes, with the real packages."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    tensorboard_hyperparameters,
    tensorboard_points,
    wandb_configs,
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


def assert_curves(folder: Path, lines: list[dict[Point, float]], mlflow: str = "") -> None:
    """Assert that each sink has one run, each step of it once, with the values that were printed.

    TensorBoard has those of the last attempt that did a step, the others those of the first one. That one's line may be
    lost with its launcher: only what does not depend on the attempt is compared then.
    """
    expected = last(lines)
    (curve,) = tensorboard_points(folder / "tb").values()
    assert curve == pytest.approx(expected, rel=1e-6)
    for curves in (mlflow_points(mlflow or (folder / "mlruns").as_uri()), wandb_points(folder / "wb")):
        (curve,) = curves.values()
        assert curve.keys() == expected.keys()
        assert [p for p in curve if p[0] in ("loss", "part/a") and curve[p] != expected[p]] == []
        assert [p for p in curve if p[0] in ("attempt", "val") and curve[p] > expected[p]] == []


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
        curves = [*mlflow_points(address).values(), *wandb_points(folder / "wb").values()]
        # Reading takes a second or more where the machine is busy: an evaluation of just now may be lost.
        still = step_of(folder) // 10 == now // 10
        return still and len(curves) == 2 and all(evaluation in curve for curve in curves)

    run.until(done, f"the sinks have step {step}")


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
    assert_curves(tmp_path, lines)


@pytest.mark.soak
def test_a_server_of_mlflow_has_one_curve_too(
    job: Callable[..., Pods], root: Path, server: str, tmp_path: Path
) -> None:
    place = {user_env.CHECKPOINT: str(tmp_path / "checkpoints"), "MLFLOW_TRACKING_URI": server}
    run = job(**place)
    run.start("train.py", END, "0.2")
    reach_sinks(run, tmp_path, 10, server)
    os.kill(run.pid(0, 0), signal.SIGKILL)
    run.pid(1, 0)
    reach_sinks(run, tmp_path, step_of(tmp_path) + 10, server)
    delete_pods(run, root, 0)
    run.start("train.py", END, "0.2", only=0)
    assert run.wait() == [0, 0], run.logs_of_all()
    lines = printed(run.log(0))
    assert_curves(tmp_path, lines, server)
    resumed = job(1, **place, **{pod_env.JOB_UID: "two", user_env.JOB: "other"})
    step = step_of(tmp_path)
    resumed.start("train.py", str(step + 11), "0")
    assert resumed.wait() == [0], resumed.log()
    assert_curves(tmp_path, lines + printed(resumed.log()), server)


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


def test_the_runs_say_what_was_trained(job: Callable[..., Pods], sinks: dict[str, str], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run = job(1, **{user_env.NAMESPACE: "team", user_env.POD_IMAGE: "team/train:1"})
    run.start("train.py", "4", "0")
    assert run.wait() == [0], run.log()
    (found,) = MlflowClient(tracking_uri=sinks["MLFLOW_TRACKING_URI"]).search_runs(["0"])
    assert found.info.status == "FINISHED"
    assert found.data.params == {
        "lr": "0.1",
        "optimizer/name": "sgd",
        "optimizer/betas": "(0.9, 0.99)",
        "secret": "None",
    }
    settings = {name.removeprefix("flk."): value for name, value in found.data.tags.items() if name.startswith("flk.")}
    run_id = settings.pop("run")
    code = settings.pop("code")
    assert code != ""
    own = {"job": "test", "namespace": "team", "image": "team/train:1", "strategy": "ddp"}
    assert settings == own | {"world_size": "1", "restarts": "0"}
    known = {f"flk.{name}": value for name, value in own.items()} | {"flk.code": code}
    known |= {"lr": 0.1, "optimizer/name": "sgd", "optimizer/betas": "(0.9, 0.99)", "secret": "None"}
    known |= {"flk.world_size": 1, "flk.restarts": 0}
    assert tensorboard_hyperparameters(tmp_path / "tb" / run_id) == known
    (config,) = wandb_configs(tmp_path / "wb").items()
    assert (config[0], {name: config[1].get(name) for name in known}) == (run_id, known)


OWN_RUN = """
    import wandb, mlflow
    import flk_runtime as flk

    own = wandb.init(settings=wandb.Settings(console="off"))
    with mlflow.start_run(run_name="own"):
        run = flk.init()
        for loss in (3.0, 2.0):
            run.log(loss=loss)
            own.log({"loss": loss})
        run.close()
    own.finish()
"""


def test_a_script_with_a_run_of_its_own_gets_no_second_one(
    job: Callable[..., Pods], sinks: dict[str, str], tmp_path: Path
) -> None:
    run = job(1)
    run.write(OWN_RUN)
    run.start("train.py")
    assert run.wait() == [0], run.log()
    for name in ("mlflow", "wandb"):
        line = f"flk: the script has a run of its own in {name}: flk writes nothing there"
        assert run.log().count(line) == 1, run.log()
    assert list(mlflow_points(sinks["MLFLOW_TRACKING_URI"])) == ["own"]
    assert len(list((tmp_path / "wb").glob("wandb/offline-run-*"))) == 1


OWN_LOOP = """
    import sys
    import torch
    import flk_runtime as flk

    model = torch.nn.Linear(1, 1)
    with flk.adopt(model=model, log_every=1, metrics=sys.argv[1]) as loop:
        while loop.steps < 3:
            loop.step(loss=1.0 / (loop.steps + 1), samples=4)
        loop.log(val=0.5)
"""


def test_a_loop_of_the_script_has_curves_too(job: Callable[..., Pods], tmp_path: Path) -> None:
    run = job(1)
    run.write(OWN_LOOP)
    run.start("train.py", f"tensorboard:{tmp_path}/own")
    assert run.wait() == [0], run.log()
    (curve,) = tensorboard_points(tmp_path / "own").values()
    assert curve == pytest.approx(last(printed(run.log())), rel=1e-6)
    assert ("val", 3) in curve


def test_sinks_that_are_away_do_not_end_the_training(job: Callable[..., Pods], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    away = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    run = job(1, **away, **{user_env.METRICS: f"tensorboard:{tmp_path}/file,mlflow"})
    run.start("train.py", "20", "0")
    assert run.wait() == [0], run.log()
    assert run.log().count("flk tries again, and training goes on") == 2, run.log()
    assert run.log().count("lines of metrics may be missing, steps ") == 2, run.log()


RAISES = """
    import os
    import flk_runtime as flk

    run = flk.init(log_every=1)
    for _ in range(4):
        run.step(loss=1.0)
    raise ValueError(f"of the test, with {os.environ['MY_TOKEN']}")
"""


@pytest.fixture
def slow_server() -> Iterator[str]:
    """The address of a server that answers each request after 3 s."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ended.wait(3)
            with contextlib.suppress(OSError):  # the rank has ended
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    ended.set()
    server.shutdown()
    server.server_close()


def test_lines_that_a_slow_server_does_not_get_before_a_failed_rank_ends_are_named(
    job: Callable[..., Pods], slow_server: str
) -> None:
    """The rank has 5 s, after which its launcher kills it."""
    run = job(
        1, **{user_env.METRICS: "mlflow", "MLFLOW_TRACKING_URI": slow_server, pod_env.RESTARTS: "0"}, MY_TOKEN=CANARY
    )
    run.write(RAISES)
    run.start("train.py")
    assert run.wait() == [100], run.log()
    found = re.findall(r"MLflow: not all is written after 3 s; .* may be missing, steps (.*)", run.log())
    assert found == ["1-4"], run.log()
    failure = run.record().failure
    assert failure is not None
    assert failure.message == "of the test, with ***"
    assert CANARY not in run.log() + (run.folder / "termination.0").read_text()


def test_a_sink_that_is_not_installed_ends_the_job_before_it_trains(job: Callable[..., Pods], tmp_path: Path) -> None:
    run = job(1)
    run.write("import sys; sys.modules['wandb'] = None; import flk_runtime; flk_runtime.init().log(loss=1.0)")
    run.start("train.py")
    assert run.wait() == [2], run.log()
    assert "FLK_METRICS: wandb needs the package wandb, which this image lacks" in run.log()
    assert not (tmp_path / "tb").exists()
