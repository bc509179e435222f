"""JSON of what jobs print, whose losses may be no numbers."""

from __future__ import annotations

import json

import pytest

from flk.cli.json_text import json_text


def refuse(word: str) -> None:
    pytest.fail(f"{word} is not in JSON")


def test_what_json_cannot_have_is_a_string() -> None:
    data = {"a": [1.5, float("nan"), (float("inf"), -float("inf"))], "b": {"c": None}}
    expected = {"a": [1.5, "NaN", ["Infinity", "-Infinity"]], "b": {"c": None}}
    assert json.loads(json_text(data), parse_constant=refuse) == expected
    assert json_text({"a": 1}, indent=None) == '{"a": 1}'
