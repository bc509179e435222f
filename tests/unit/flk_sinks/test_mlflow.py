"""What MLflow gets of names that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from flk_sinks.mlflow import MLflow
from flk_sinks.sink import Row, RunInfo

# Names that scripts give, and those under which MLflow has them.
NAMES = {
    "loss": "loss",
    "validation/loss": "validation/loss",
    "train/": "train",
    "a//b": "a/b",
    "a/b/": "a/b-6dd57adb",  # the name above has another curve
    "/absolute": "absolute",
    "../above": "above",
    ".": "_",
    "größe?": "größe_",
    "l" * 300: "l" * 250,
    f"{'d' * 249}/x": "d" * 249,
}


def test_names_that_mlflow_refuses_keep_nothing_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sink = MLflow(RunInfo("run", "run", "run", hyperparameters=dict.fromkeys(NAMES, 1)))
    sink.open()
    sink.describe()
    sink.write([Row(1, 1.0, dict.fromkeys(NAMES, 0.5)), Row(2, 2.0, {"loss": 0.25})])
    sink.close("finished")
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.data.metrics == dict.fromkeys(NAMES.values(), 0.5) | {"loss": 0.25}
    assert run.data.params.keys() == set(NAMES.values())
