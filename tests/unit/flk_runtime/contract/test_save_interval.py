"""The steps between two checkpoints: what users may give."""

from __future__ import annotations

from typing import Any

import pytest

from flk_runtime.contract.save_interval import MOST, check_interval, parse_interval


@pytest.mark.parametrize("value", [1, MOST, "auto"])
def test_a_number_of_steps_and_auto_are_taken(value: int | str) -> None:
    assert check_interval(value, 1) == parse_interval(str(value)) == value


@pytest.mark.parametrize("value", [0, MOST + 1, True, 1.0, "1", "often", None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^expected auto or a number of steps from 1 to {MOST}$"):
        check_interval(value, 1)


@pytest.mark.parametrize("text", ["-1", "1e3", "often", str(MOST + 1)])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^expected auto or a number of steps from 0 to {MOST}$"):
        parse_interval(text)
