"""Sets of messages: each message is a dataclass, and travels as JSON with the name of its class.

What is read is checked against the annotations of the class (`flk_runtime.contract.foreign`). `Done`, `Failed` and
`Refused` are in several sets.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from flk_runtime.contract import foreign
from flk_runtime.errors import RuntimeFailure

M = TypeVar("M")
LIMIT: Final = 1 << 26  # bytes of a message: headers of shards are long


@dataclass(frozen=True)
class Done:
    """Answer: the request is done."""


@dataclass(frozen=True)
class Failed:
    """Answer: the request was not done."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Answer: the receiver cannot take part and has to leave."""

    reason: str


class MessageError(RuntimeFailure, ConnectionError):
    """The received data is not a message of the set."""


class Registry(Generic[M]):
    """A set of messages that one kind of connection carries."""

    def __init__(self, messages: Iterable[type]) -> None:
        self._classes = {message.__name__: message for message in messages}

    def encode(self, message: M) -> bytes:
        """The message as JSON. Its floats are finite."""
        return json.dumps([type(message).__name__, message], separators=(",", ":"), default=_fields).encode()

    def decode(self, data: bytes) -> M:
        """The message that was encoded. Raises MessageError if ``data`` is none of this set."""
        try:
            name, fields = foreign.parse(data, LIMIT)
            message: M = foreign.read(self._classes[name], fields)
        except foreign.ERRORS as error:  # two values and no others, of which the first is a name
            raise MessageError(f"the other end sent what is not a message: {error!r}"[:200]) from error
        return message


def _fields(message: Any) -> dict[str, Any]:
    """The fields whose values differ from their defaults: most fields in the status of a rank have theirs."""
    defaults = _defaults(message.__class__)
    return {name: value for name, value in vars(message).items() if value != defaults.get(name, dataclasses.MISSING)}


@functools.cache
def _defaults(kind: type) -> dict[str, Any]:
    return {
        each.name: each.default_factory() if callable(each.default_factory) else each.default
        for each in dataclasses.fields(kind)
    }
