"""Foreign values have bounds, and one error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from flk_runtime.contract import foreign
from flk_runtime.contract.foreign import AtMost, Count, Time
from flk_runtime.contract.quantities import parse_ranges


@dataclass(frozen=True)
class Row:
    name: str
    time: Time = 0.0
    count: Count = 0
    pods: Annotated[str, parse_ranges] = ""
    few: Annotated[list[int], AtMost(3)] = field(default_factory=list)
    rest: dict[int, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000,
        "[" * 70 + "]" * 70,
        "9" * 5_000,
        "-" + "9" * 300,
        "NaN",
        "[Infinity]",
        '{"a":[-Infinity]}',
        "1e999",
        f"[{2**70}.0,{2**70},{2**70}.0]",
        "[" + ",".join(str(each * (2**61 - 1)) for each in range(5, 60_000)) + "]",  # all have the same hash
        "\x00",
        "",
        "[" + "0," * (foreign.LIMIT // 2) + "0]",
        b"\xff\xfe\x00",
        b"\x80",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_is_no_bounded_json_is_refused_by_one_error(text: str | bytes) -> None:
    with pytest.raises(foreign.ForeignError) as refused:
        foreign.parse(text)
    assert len(str(refused.value)) < 300
    assert "ForeignError" not in str(refused.value)


@pytest.mark.parametrize("value", [None, True, 2**63 - 1, 1e300, "x", "[" * 1000, [[1], {"a": {}}], {"a": "\ud800"}])
def test_other_json_is_read_as_it_is(value: Any) -> None:
    assert foreign.parse(json.dumps(value)) == value
    assert foreign.bounded(value) == value


def test_an_object_is_no_list() -> None:
    assert foreign.parse_object("{}") == {}
    with pytest.raises(foreign.ForeignError, match="a list and no object"):
        foreign.parse_object("[]")


@pytest.mark.parametrize(
    "changed",
    [
        {"time": -1.0},
        {"time": 1e300},
        {"time": float("nan")},
        {"count": -1},
        {"count": 2**62},
        {"count": True},
        {"pods": "x"},
        {"pods": "5-1"},
        {"pods": "0-99999999999"},
        {"pods": "0-9," * 2_000 + "1"},
        {"pods": "9" * 5_000},
        {"few": [1, 2, 3, 4]},
        {"few": {"0": 1}},
        {"rest": {"9" * 5_000: 1.0}},
        {"rest": {"x": 1.0}},
        {"rest": {"1": 10**400}},
        {"name": None},
    ],
    ids=lambda changed: repr(changed)[:30],
)
def test_a_value_outside_of_its_bounds_is_refused(changed: dict[str, Any]) -> None:
    assert foreign.read(Row, {"name": "x", "pods": "0-2,5", "time": 1, "few": [1]}).pods == "0-2,5"
    with pytest.raises(foreign.ForeignError):
        foreign.read(Row, {"name": "x", **changed})


def test_a_whole_number_may_be_text() -> None:
    assert foreign.whole("12", 0, 20) == foreign.whole(12, 0, 20) == 12
    assert foreign.whole("-1", -1, 20) == -1
    for value in ("", "-", "x", "1.0", "9" * 5_000, "21", 21, -1, 1.0, True, None, [], "\u0663"):
        with pytest.raises(foreign.ForeignError):
            foreign.whole(value, 0, 20)


@pytest.mark.parametrize("error", [RecursionError, MemoryError, OverflowError, IndexError, KeyError, AttributeError])
def test_a_reader_of_a_class_raises_what_it_likes(error: type[Exception]) -> None:
    @dataclass
    class Strange:
        def __post_init__(self) -> None:
            raise error("x")

    with pytest.raises(foreign.ForeignError, match=error.__name__):
        foreign.load(Strange, "{}")
