"""Classes of values behave as frozen dataclasses do, but that nothing at run time refuses an assignment."""

from __future__ import annotations

import dataclasses

import pytest

from flk_runtime.contract.values import asdict, dataclass, field, replace


@dataclass(frozen=True)
class Place:
    name: str
    tags: tuple[str, ...] = field(default=(), compare=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Port(Place):
    number: int = 80


@dataclasses.dataclass(frozen=True)
class Expected:
    """The same fields in a dataclass of Python."""

    name: str
    tags: tuple[str, ...] = field(default=(), compare=False)
    token: str = field(default="", repr=False)


def test_values_are_equal_by_the_fields_that_count() -> None:
    assert Place("a") == Place("a", ("x",)) != Place("b")
    assert {Place("a", ("x",)), Place("a"), Place("a", token="t")} == {Place("a"), Place("a", token="t")}
    assert Place("a") != Expected("a")
    assert Port("a") != Place("a")
    assert Port("a", number=1) != Port("a")


def test_a_value_is_printed_without_the_fields_that_are_not_shown() -> None:
    assert repr(Place("a", token="secret")) == repr(Expected("a", token="secret")).replace("Expected", "Place")
    assert repr(Port("a")) == "Port(name='a', tags=(), number=80)"


def test_values_are_dataclasses() -> None:
    assert asdict(replace(Port("a"), number=1)) == {"name": "a", "tags": (), "token": "", "number": 1}
    assert Place.__match_args__ == Expected.__match_args__


def test_a_value_with_a_list_is_no_key() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Place([]))  # type: ignore[arg-type]  # as a field of a list would be


@pytest.mark.parametrize("name", ["__eq__", "__hash__", "__repr__"])
def test_a_method_of_a_class_that_values_share_is_refused(name: str) -> None:
    own = type("Own", (), {name: lambda self, *_: "own", "__annotations__": {"number": "int"}})
    with pytest.raises(TypeError, match=f"Own has {'__(eq|hash)__' if name == '__eq__' else name}, which all values"):
        dataclass(frozen=True)(own)
