"""Foreign values: what another user's object, pod, file or connection says, with bounds on its size and effect.

Whoever may write it may write anything: JSON that is nested 100,000 deep, numbers of 5,000 digits, NaN, text in the
place of a number. All of it is read here, so all of it has the same bounds, and one error: `ForeignError`.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, TypeVar

from flk_runtime.contract import typed

T = TypeVar("T")
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
    except ForeignError:
        raise
    except ERRORS as error:
        raise ForeignError(f"it is no JSON that can be read: {_reason(error)}") from None
    return bounded(value)


def parse_object(text: str | bytes | bytearray, limit: int = LIMIT) -> dict[str, Any]:
    """As `parse`; the value is an object of JSON."""
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
            elif kind is int and abs(each) > typed.LARGEST:
                raise ForeignError("a number is too large")
            elif kind is float and not math.isfinite(each):
                raise ForeignError("a number is not finite")
        if not below:
            return value
        level = below
    raise ForeignError(f"it is nested more than {DEPTH} deep")


def read(kind: type[T], value: Any) -> T:
    """A value with this annotation (a dataclass, ``list[int]``, ...), of plain JSON, as `typed.read` makes it.

    Raises ForeignError, and nothing else.
    """
    try:
        return typed.read(kind, value)
    except ForeignError:
        raise
    except ERRORS as error:
        raise ForeignError(_reason(error)) from None


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
    return f"{type(error).__name__}: {error}"[:200]
