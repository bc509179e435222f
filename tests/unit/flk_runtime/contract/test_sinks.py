"""The text that names the sinks of a job."""

from __future__ import annotations

import pytest

from flk_runtime.contract.sinks import SinkName, implied_sinks, parse_sinks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", []),
        ("wandb", [("wandb", "")]),
        ("tensorboard:/a/b", [("tensorboard", "/a/b")]),
        (
            "mlflow,tensorboard:s3://bucket/a:b,wandb",
            [("mlflow", ""), ("tensorboard", "s3://bucket/a:b"), ("wandb", "")],
        ),
    ],
)
def test_sinks_are_read(text: str, expected: list[tuple[str, str]]) -> None:
    assert list(parse_sinks(text)) == expected


@pytest.mark.parametrize(
    "text", ["", "tensorboard", "tensorboard:", "tensorboard:logs", "neptune", "none,wandb", "wandb,", "mlflow:x", " "]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected tensorboard:/PATH, mlflow and wandb, separated by commas, or none"):
        parse_sinks(text)


def test_a_sink_is_named_once() -> None:
    with pytest.raises(ValueError, match="names wandb twice"):
        parse_sinks("wandb,mlflow,wandb")


def test_a_key_alone_implies_no_sink() -> None:
    assert implied_sinks({"WANDB_API_KEY": "x", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": ""}) == ()
    assert implied_sinks({"WANDB_PROJECT": "p"}) == (SinkName("wandb"),)
    assert implied_sinks({"MLFLOW_TRACKING_URI": "http://mlflow"}) == (SinkName("mlflow"),)
