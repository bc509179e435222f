"""The steps between two checkpoints: what users may give."""

from __future__ import annotations

from typing import Any

import pytest

from flk_runtime.contract.options import (
    MOST_STEPS,
    SinkName,
    check_interval,
    implied_sinks,
    parse_interval,
    parse_sinks,
)


@pytest.mark.parametrize("value", [1, MOST_STEPS])
def test_a_number_of_steps_is_taken(value: int) -> None:
    assert check_interval(value, 1) == parse_interval(str(value)) == value


@pytest.mark.parametrize("value", [0, MOST_STEPS + 1, True, 1.0, "1", "often", None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^expected a number of steps from 1 to {MOST_STEPS}$"):
        check_interval(value, 1)


@pytest.mark.parametrize("text", ["-1", "1e3", "auto", str(MOST_STEPS + 1)])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^expected a number of steps from 0 to {MOST_STEPS}$"):
        parse_interval(text)


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
    ("text", "said"),
    [
        *(
            (text, "expected tensorboard:/PATH, mlflow and wandb, separated by commas, or none")
            for text in ("", " ", "tensorboard", "tensorboard:", "tensorboard:logs", "neptune")
        ),
        *((text, "separated by commas, or none") for text in ("none,wandb", "wandb,", "mlflow:x")),
        ("wandb,mlflow,wandb", "names wandb twice"),
    ],
)
def test_other_texts_name_no_sink_and_a_sink_is_named_once(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_sinks(text)


def test_a_key_alone_implies_no_sink() -> None:
    assert implied_sinks({"WANDB_API_KEY": "x", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": ""}) == ()
    assert implied_sinks({"WANDB_PROJECT": "p"}) == (SinkName("wandb"),)
    assert implied_sinks({"MLFLOW_TRACKING_URI": "http://mlflow"}) == (SinkName("mlflow"),)
