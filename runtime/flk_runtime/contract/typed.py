"""Typed data: makes dataclasses of plain JSON, and checks each value against its annotation.

Fields that a class does not have are ignored, and so are further values of a named tuple, so that a newer flk may write
more. Floats are finite. An annotation with a check (``Annotated[int, Within(0, 9)]``, `Time`, `Count`) refuses other
values.
`flk_runtime.contract.foreign` reads what others have written.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Reader = Callable[[Any], Any]
LARGEST: Final = 2**63 - 1  # a larger number may have no float, so that computing with it fails


class Within(NamedTuple):
    """The bounds of a number, both included."""

    least: float
    most: float

    def __call__(self, number: float) -> None:
        """Raise ValueError for a number that is not within."""
        if not self.least <= number <= self.most:
            raise ValueError(f"a number is not from {self.least:g} to {self.most:g}")


class AtMost(NamedTuple):
    """The bound of the length of a list."""

    most: int

    def __call__(self, values: Sequence[Any]) -> None:
        """Raise ValueError for a longer list."""
        if len(values) > self.most:
            raise ValueError(f"a list is longer than {self.most}")


Time: TypeAlias = Annotated[float, Within(0.0, 2.0**36)]  # seconds since the epoch, which a calendar has (year 4147)
Seconds: TypeAlias = Annotated[float, Within(-(2.0**36), 2.0**36)]  # a duration
Count: TypeAlias = Annotated[int, Within(0, 2**31)]
Pods: TypeAlias = Annotated[int, Within(0, 10_000)]  # a reader may make a row for each
Processes: TypeAlias = Annotated[int, Within(0, 1_000)]  # in one pod


def read(kind: type[T], value: Any) -> T:
    """A value with this annotation, of plain JSON. Raises ValueError, KeyError and TypeError if it has another type."""
    hint: Any = kind
    found: T = _reader(hint)(value)
    return found


@functools.cache
def _reader(hint: Any) -> _Reader:
    """A function that makes a value with this annotation of plain JSON."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        return functools.partial(_approved, _reader(args[0]), args[1])
    if origin in (Union, types.UnionType):  # only with None
        (inner,) = (_reader(each) for each in args if each is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        items = [_reader(each) for each in args if each is not Ellipsis]
        if args[-1] is Ellipsis:
            return lambda values: tuple(map(items[0], _checked(values, list)))
        return lambda values: tuple(read(value) for read, value in zip(items, _checked(values, list), strict=True))
    if origin in (list, Sequence):
        item = _reader(args[0])
        return lambda values: [item(value) for value in _checked(values, list)]
    if origin in (dict, Mapping):
        key_reader = _reader(args[0])
        read_key: _Reader = (lambda key: key_reader(int(key))) if args[0] is int else key_reader  # JSON's are strings
        read_value = _reader(args[1])
        return lambda values: {read_key(key): read_value(value) for key, value in _checked(values, dict).items()}
    if hint is float:
        return lambda value: float(_checked(value, int if type(value) is int else float))
    if hint in (int, str, bool, dict, list):
        return functools.partial(_checked, kind=hint)
    if issubclass(hint, enum.Enum):
        return lambda value: hint(_checked(value, str))
    if issubclass(hint, tuple):  # a named tuple
        readers = [_reader(each) for each in get_type_hints(hint, include_extras=True).values()]
        return lambda values: hint(*(read(value) for read, value in zip(readers, _checked(values, list), strict=False)))
    return _fields_reader(hint)


@functools.cache
def _fields_reader(hint: Any) -> _Reader:
    hints = get_type_hints(hint, include_extras=True)
    fields = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(hint) if field.init}
    return lambda values: hint(
        **{name: fields[name](value) for name, value in _checked(values, dict).items() if name in fields}
    )


def _approved(read: _Reader, check: Callable[[Any], object], value: Any) -> Any:
    found = read(value)
    check(found)
    return found


def _checked(value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} is no {kind.__name__}")
    if kind is int and abs(value) > LARGEST:
        raise ValueError("a number is too large")
    if kind is float and not math.isfinite(value):
        raise ValueError("a number is not finite")
    return value
