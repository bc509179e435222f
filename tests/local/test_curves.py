"""Curves in TensorBoard, MLflow and W&B through a killed rank and a resume, with the real packages."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.support.pods import Pods
from tests.support.processes import until

CANARY = "canary-of-a-secret"


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
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return variables


@pytest.fixture
def job(forked_pods: Callable[..., Pods], root: Path, sinks: dict[str, str]) -> Callable[..., Pods]:
    def make(**variables: str) -> Pods:
        settings = {pod_env.MEMORY_ROOT: str(root), pod_env.JOB_UID: "one", pod_env.RESTARTS: "3"}
        return forked_pods(1, 1, script=TRAIN, **{**settings, **sinks, **variables})

    return make


def assert_curves(folder: Path, lines: list[dict[Point, float]]) -> None:
    """Assert that each sink has one run with the values that were printed.

    TensorBoard has those of the last attempt that did a step, the others those of any attempt, whose line may be lost
    with its launcher: only what does not depend on the attempt is compared then.
    """
    expected = last(lines)
    (curve,) = tensorboard_points(folder / "tb").values()
    assert curve == pytest.approx(expected, rel=1e-6)
    (of_mlflow,) = mlflow_points((folder / "mlruns").as_uri()).values()
    assert [p for p in of_mlflow if p[0] in ("attempt", "val") and of_mlflow[p] > expected[p]] == []
    (of_wandb,) = wandb_points(folder / "wb").values()
    for curve in (of_mlflow, of_wandb):
        assert curve.keys() == expected.keys()
        assert [p for p in curve if p[0] in ("loss", "part/a") and curve[p] != expected[p]] == []


@pytest.mark.promise("Extensions: TensorBoard, MLflow and W&B have one curve through faults")
@pytest.mark.promise("Clusters: No secret is printed, logged or kept")
@pytest.mark.soak
def test_a_job_that_resumes_from_the_checkpoint_of_another_goes_on_with_its_run_and_writes_no_secret(
    job: Callable[..., Pods], tmp_path: Path
) -> None:
    """A rank of the first job is killed. The script prints and logs secrets; the address of MLflow's files has none."""
    secrets = {"MY_TOKEN": CANARY, "WANDB_API_KEY": f"{CANARY}{'0' * 40}"}
    place = {user_env.CHECKPOINT: str(tmp_path / "checkpoints"), **secrets}
    one = job(**place)
    one.start("train.py", "1000", "0.1", f"--token={CANARY}")

    def written() -> bool:
        try:
            curves = [*mlflow_points((tmp_path / "mlruns").as_uri()).values(), *wandb_points(tmp_path / "wb").values()]
        except (AttributeError, ValueError):  # MLflow reads a file that the rank just writes
            return False
        return len(curves) == 2 and all(("loss", 14) in curve for curve in curves)

    until(written, "the sinks have step 14", every=1, context=one.log)
    (tmp_path / "die").touch()
    assert one.wait() == [0], one.log()
    lines = printed(one.log())  # the second job writes to the same file
    assert len(lines) > len({step for line in lines for _, step in line}), "steps were done again"
    assert one.log().count("resumed at step 15") == 1
    assert_curves(tmp_path, lines)

    two = job(**place, **{pod_env.JOB_UID: "two", user_env.JOB: "other"})
    two.start("train.py", "47", "0", f"--token={CANARY}")
    assert two.wait() == [0], two.log()
    assert "resumed at step 36" in two.log()
    assert_curves(tmp_path, lines + printed(two.log()))
    written_to = [path for name in ("tb", "mlruns", "wb") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert len(written_to) > 10
    written_to += [tmp_path / "log.0.0", tmp_path / "termination.0"]
    assert not [path for path in written_to if CANARY.encode() in path.read_bytes()]
    assert "[rank 0] logged in with *** --token=***\n" in two.log()
