"""JSON of what jobs print, whose losses may be no numbers, and tables that a terminal may be too narrow for."""

from __future__ import annotations

import json

import pytest

from flk.cli.output import json_text, table


def refuse(word: str) -> None:
    pytest.fail(f"{word} is not in JSON")


def test_what_json_cannot_have_is_a_string() -> None:
    data = {"a": [1.5, float("nan"), (float("inf"), -float("inf"))], "b": {"c": None}}
    expected = {"a": [1.5, "NaN", ["Infinity", "-Infinity"]], "b": {"c": None}}
    assert json.loads(json_text(data), parse_constant=refuse) == expected
    assert json_text({"a": 1}, indent=None) == '{"a": 1}'


def test_where_a_table_is_too_wide_the_last_cell_stands_below_its_row() -> None:
    header, rows = ["POD", "REASON"], [["gpt-0", "OOMKilled: it used more than 16Gi"], ["gpt-1", ""]]
    assert table(header, rows, width=80)[1] == "gpt-0   OOMKilled: it used more than 16Gi"
    assert table(header, rows, width=30) == ["POD", "gpt-0", "  OOMKilled: it used more than 16Gi", "gpt-1"]
