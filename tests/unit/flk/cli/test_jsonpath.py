"""Templates of JSONPath: what kubectl prints for them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from flk.cli.data_output import DataOutput
from flk.cli.jsonpath import parse_template
from flk.errors import UsageError

DATA = {
    "kind": "ConfigMap",
    "metadata": {"name": "x", "labels": {"a.b/c": "d"}},
    "data": {"a": "1", "b": "2"},
    "items": [{"name": "one", "step": 3, "on": True}, {"name": "two", "step": 12, "end": None}],
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.metadata.name}", "x"),
        (r"{.metadata.labels.a\.b/c}", "d"),
        ("{.metadata.labels['a\\.b/c']}", "d"),
        ("{$.data}", '{"a":"1","b":"2"}'),
        ("{.data.*}", "1 2"),
        ("{.data['a','b']}", "1 2"),
        ('{range .data.*}[{@}]{"\\n"}{end}', "[1]\n[2]\n"),
        ("{..labels}", '{"a.b/c":"d"}'),
        ("x{.nope.deeper}y", "xy"),
        ('{.data.a}{"\\t"}{.data.b}', "1\t2"),
        ("{.items[*].name} {.items[-1].name} {.items[0,1].step} {.items[1:].name}", "one two two 3 12 two"),
        ("{.items[5].name}{.data[0]}{.items.name}", ""),
        ("{.items[?(@.step>3)].name}", "two"),
        ('{.items[?(@.name=="one")].step}', "3"),
        ("{.items[?(@.on)].name}{.items[?(@.name>3)].name}", "one"),
        ("{.items[*].on}{.items[*].end}", "true"),
    ],
)
def test_template(template: str, text: str) -> None:
    assert parse_template(template)(DATA) == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (".metadata.name", "braces"),
        ("{.kind} {.data", "no end"),
        ("{end}", "{end} without {range …}"),
        ("{range .items[*]}", "{range …} without {end}"),
        ("{.data.a b}", "' b' is no step of a path"),
        ("{.items[0}", "no closing bracket"),
        ("{.items[x]}", "[x] is not supported"),
        ("{.items[::-1]}", "at least 1"),
        ("{.items[?(@.a && @.b)]}", "a filter must be"),
        ("{.items[?(@.a == b)]}", "b is neither a number nor text"),
        ("{if .a}", "no step"),
    ],
)
def test_what_is_refused(template: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_template(template)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        ("NAME:.name,STEP:.step,END:.end", ["NAME   STEP   END", "one    3      <none>", "two    12     <none>"]),
        ("N:name,ALL:{.*}", ["N     ALL", "one   one,3,true", "two   two,12,"]),
        ("N:.tags[0,1]", ["N", "<none>", "<none>"]),
    ],
)
def test_columns(columns: str, lines: list[str]) -> None:
    assert DataOutput.parse(f"custom-columns={columns}").text(DATA).splitlines() == lines


@pytest.mark.parametrize(
    "value", ["custom-columns=", "custom-columns=NAME", "custom-columns=A:.a,:.b", "go-template=x"]
)
def test_columns_and_formats_that_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="--output: "):
        DataOutput.parse(value)


def test_one_object_is_one_row() -> None:
    one: Any = DATA["items"]
    assert DataOutput.parse("custom-columns=N:.name").text(one[0]) == "N\none\n"
