"""Sets of messages: each message is a dataclass, and travels as JSON with the name of its class.

What is read is checked against the annotations of the class. Fields that the class does not have are ignored, and so
are further values of a named tuple, so that a newer flk may send more.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from flk_runtime.errors import RuntimeFailure

M = TypeVar("M")
_Reader = Callable[[Any], Any]
_LARGEST = 2**63 - 1  # a larger number may have no float, so that computing with it fails


class MessageError(RuntimeFailure):
    """The received data is not a message of the set."""


@dataclass(frozen=True)
class Unreadable:
    """Stands for a message of an authenticated end that this version of flk cannot read."""

    reason: str


class Registry(Generic[M]):
    """A set of messages that one kind of connection carries."""

    def __init__(self, messages: Iterable[type]) -> None:
        self._classes = {message.__name__: message for message in messages}

    def encode(self, message: M) -> bytes:
        """The message as JSON. A float that is infinite or NaN is written as Python does."""
        return json.dumps([type(message).__name__, message], separators=(",", ":"), default=_plain).encode()

    def decode(self, data: bytes) -> M:
        """The message that was encoded. Raises MessageError if ``data`` is none of this set."""
        try:
            name, fields = json.loads(data)
            message: M = _reader(self._classes[name])(fields)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MessageError(f"not a message: {error!r}"[:200]) from error
        return message


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return vars(value)
    raise TypeError(f"{type(value).__name__} does not travel")


@functools.cache
def _reader(hint: Any) -> _Reader:
    """A function that makes a value with this annotation of plain JSON. It raises the errors that `decode` expects."""
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
    if origin is list:
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
    hints = get_type_hints(hint)
    if issubclass(hint, tuple):  # a named tuple
        readers = [_reader(each) for each in hints.values()]
        return lambda values: hint(*(read(value) for read, value in zip(readers, _checked(values, list), strict=False)))
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
