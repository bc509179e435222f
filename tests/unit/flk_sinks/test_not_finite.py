"""A loss that is not finite is a point of the curve in each sink, and so are the losses after it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flk_sinks.mlflow import MLflow
from flk_sinks.sink import Row, RunInfo, Sink
from flk_sinks.tensorboard import TensorBoard
from flk_sinks.wandb import WandB
from tests.support import curves
from tests.support.processes import until

LOSSES = {1: 2.0, 2: math.nan, 3: math.inf, 4: -math.inf, 5: 1.0}
INFO = RunInfo("run", "run", "run")


@pytest.mark.parametrize("package", ["tensorboard", "mlflow", "wandb"])
def test_losses_that_are_not_finite_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    store = (tmp_path / "runs").as_uri()
    for name, value in {
        "MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_MODE": "offline", "WANDB_DIR": "."
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    sinks: dict[str, Sink] = {
        "tensorboard": TensorBoard(INFO, str(tmp_path)), "mlflow": MLflow(INFO), "wandb": WandB(INFO)
    }  # fmt: skip
    sink = sinks[package]
    sink.open()
    sink.write([Row(step, float(step), {"loss": loss}) for step, loss in LOSSES.items()])
    sink.close("finished")
    points = {
        "tensorboard": lambda: curves.tensorboard_points(tmp_path),
        "mlflow": lambda: curves.mlflow_points(store),
        "wandb": lambda: curves.wandb_points(tmp_path),
    }[package]

    def losses() -> dict[int, str]:
        return {step: str(float(value)) for (name, step), value in points()["run"].items() if name == "loss"}

    # A process of W&B writes the end of its file after the run is closed.
    until(lambda: len(losses()) == len(LOSSES), "the sink has each loss", context=lambda: str(losses()))
    assert losses() == {step: str(loss) for step, loss in LOSSES.items()}
