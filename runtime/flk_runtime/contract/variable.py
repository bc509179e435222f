"""An environment variable of the contract: its name, what it means, its default, and how its text is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, TypeGuard, TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3})?)(|Ki|Mi|Gi|Ti)")
_UNITS: Final = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


class VariableError(ValueError):
    """The text of an environment variable is wrong; the message names the variable."""


class Variable(str, Generic[T]):
    """The name of an environment variable, with what it means.

    ``default`` is its value where it is unset or empty. ``parse`` converts its text, or raises ValueError with what was
    expected; None: the value is the text.
    """

    meaning: str
    default: T
    parse: Callable[[str], T] | None

    def __new__(cls, name: str, meaning: str, default: T, parse: Callable[[str], T] | None = None) -> Variable[T]:
        self = super().__new__(cls, name)
        self.meaning, self.default, self.parse = meaning, default, parse
        return self

    def __reduce__(self) -> Any:  # a copy is the name alone
        return str, (str(self),)

    def read(self, environ: Mapping[str, str]) -> T:
        """Return the value in ``environ``, or the default. Raises VariableError."""
        text: Any = environ.get(self, "")
        if not text:
            return self.default
        try:
            return self.parse(text) if self.parse else text
        except ValueError as error:
            raise VariableError(f"{self}={text}: {error}") from None


class Setting(Variable[T]):
    """A variable that users may set. It configures the runtime and does not describe the job."""


def number(least: float = 0) -> Callable[[str], float]:
    """Return a parser of finite numbers of seconds that are at least ``least``."""
    return _bounded(float, "a number of seconds", least, math.inf)


def words(text: str) -> tuple[str, ...]:
    """Read words as a shell does, on several lines too. Raises ValueError for an open quotation."""
    import shlex  # few jobs have such a variable

    # A shell drops a backslash at the end of a line, but in single quotes. shlex makes a word of the end of the line.
    joined = re.sub(
        r"""(?s)'[^']*'|"(?:\\.|[^"\\])*"|\\.""",
        lambda part: part[0] if part[0][0] == "'" else part[0].replace("\\\n", ""),
        text,
    )
    try:
        return tuple(shlex.split(joined))
    except ValueError as error:
        raise ValueError(f"expected words as a shell reads them: {str(error).lower()}") from None


def integer(least: int = 0) -> Callable[[str], int]:
    """Return a parser of integers that are at least ``least`` and fit into 64 bits."""
    return _bounded(int, "an integer", least, 1 << 63)


def _bounded(convert: Callable[[str], N], kind: str, least: N, limit: N) -> Callable[[str], N]:
    """Return a parser of what ``convert`` reads that is at least ``least`` and less than ``limit``."""

    def parse(text: str) -> N:
        try:
            value = convert(text)
        except ValueError:
            raise ValueError(f"expected {kind}") from None
        if not least <= value < limit:
            raise ValueError(f"expected {kind}, {least:g} or more")
        return value

    return parse


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether ``value`` is an integer, ``least`` or more, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def choice(known: Iterable[str]) -> Callable[[str], str]:
    """Return a parser that accepts the texts of ``known`` only."""
    allowed = tuple(known)

    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"expected {' or '.join(allowed)}")
        return text

    return parse


def size(text: str) -> int:
    """Return the number of bytes in a text such as ``8Gi``."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError("expected a number of bytes such as 8Gi or 500Mi")
    return int(float(match[1]) * _UNITS[match[2]])
