"""Foreign values: what another user's object, pod, file or connection says, with bounds on its size and effect.

Whoever may write it may write anything: JSON that is nested 100,000 deep, numbers of 5,000 digits, NaN, text in the
place of a number. All of it is read here, so all of it has the same bounds, and one error: `ForeignError`.

`read` makes dataclasses of plain JSON, and checks each value against its annotation. Fields that a class does not
have are ignored, and so are further values of a named tuple, so that a newer flk may write more. Floats are finite. An
annotation with a check (``Annotated[int, Within(0, 9)]``, `Time`, `Count`) refuses other values.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
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
        raise ForeignError("a number is too large")
    if kind is float and not math.isfinite(value):
        raise ForeignError("a number is not finite")
    return value


_DIGITS: Final = 20

LIMIT: Final = 1 << 22  # bytes or characters of a text; an object of the Kubernetes API has at most 1.5 MiB
DEPTH: Final = 64  # of lists and objects in each other
ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What reading a foreign value by hand may raise, for code that cannot use `read`."""


class ForeignError(ValueError):
    """A foreign value cannot be used; the message says why in a few words, without the value."""


def parse(text: str | bytes | bytearray, limit: int = LIMIT) -> Any:
    """The plain value that a text of JSON contains. Raises ForeignError, and nothing else.

    Its numbers are finite and below 2**63, and it is nested at most DEPTH deep. ``limit``: bytes or characters.
    """
    if len(text) > limit:
        raise ForeignError(f"it is longer than {limit} bytes")
    try:
        value = json.loads(text, parse_constant=_refuse)
    except ERRORS as error:
        raise ForeignError(f"it is no JSON that can be read: {_reason(error)}") from None
    return bounded(value)


def parse_object(text: str | bytes | bytearray, limit: int = LIMIT) -> dict[str, Any]:
    """The object that a text of JSON contains, by the rules of `parse`. Raises ForeignError for other values, too."""
    value = parse(text, limit)
    if type(value) is not dict:
        raise ForeignError(f"it is {_name(value)} and no object")
    return value


def bounded(value: Any) -> Any:
    """A plain value that another parser has read (YAML, a library), if it has the bounds of `parse`.

    Raises ForeignError.
    """
    level = [value]
    for _ in range(DEPTH + 1):
        below: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is dict:
                below += each.values()
            elif kind is list:
                below += each
            elif kind is int or kind is float:
                _checked(each, kind)
        if not below:
            return value
        level = below
    raise ForeignError(f"it is nested more than {DEPTH} deep")


def read(kind: type[T], value: Any) -> T:
    """A value with this annotation (a dataclass, ``list[int]``, ...), of plain JSON. Raises ForeignError only."""
    hint: Any = kind
    try:
        found: T = _reader(hint)(value)
    except ERRORS as error:
        raise ForeignError(_reason(error)) from None
    return found


def load(kind: type[T], text: str | bytes | bytearray, limit: int = LIMIT) -> T:
    """A value with this annotation, of a text of JSON. Raises ForeignError, and nothing else."""
    return read(kind, parse(text, limit))


def whole(value: Any, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``, of an int or of text in decimal digits. Raises ForeignError."""
    if type(value) is str and value.isascii() and value.removeprefix("-").isdigit() and len(value) <= _DIGITS:
        value = int(value)
    if type(value) is not int:
        raise ForeignError(f"it is {_name(value)} and no whole number")
    if not least <= value <= most:
        raise ForeignError(f"it is not from {least} to {most}")
    return value


def _refuse(name: str) -> None:
    raise ForeignError(f"{name} is no number of JSON")


def _name(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null"}.get(type(value), type(value).__name__)


def _reason(error: BaseException) -> str:
    name = "" if isinstance(error, ForeignError) else f"{type(error).__name__}: "
    return f"{name}{error}"[:200]
