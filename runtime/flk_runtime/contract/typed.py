"""Typed data: makes dataclasses of plain JSON, and checks each value against its annotation.

Fields that a class does not have are ignored, and so are further values of a named tuple, so that a newer flk may write
more. A class with a method `from_dict` is made by it, since it knows what earlier versions have written.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Reader = Callable[[Any], Any]
_LARGEST = 2**63 - 1  # a larger number may have no float, so that computing with it fails


def read(kind: type[T], value: Any) -> T:
    """A value with this annotation, of plain JSON. Raises ValueError, KeyError and TypeError if it has another type."""
    hint: Any = kind
    found: T = _reader(hint)(value)
    return found


def read_fields(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass of the values of its fields, for its own `from_dict`. Raises as `read`."""
    hint: Any = kind
    found: T = _fields_reader(hint)(data)
    return found


@functools.cache
def _reader(hint: Any) -> _Reader:
    """A function that makes a value with this annotation of plain JSON."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
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
        readers = [_reader(each) for each in get_type_hints(hint).values()]
        return lambda values: hint(*(read(value) for read, value in zip(readers, _checked(values, list), strict=False)))
    if hasattr(hint, "from_dict"):
        return lambda value: hint.from_dict(_checked(value, dict))
    return _fields_reader(hint)


@functools.cache
def _fields_reader(hint: Any) -> _Reader:
    hints = get_type_hints(hint)
    fields = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(hint) if field.init}
    return lambda values: hint(
        **{name: fields[name](value) for name, value in _checked(values, dict).items() if name in fields}
    )


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError("a number is too large")
    return value
