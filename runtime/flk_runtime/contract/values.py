"""Values: dataclasses and enumerations of text, in the form that client and runtime use.

The dataclasses are frozen to mypy, and compared and printed by their fields, in classes that are made fast.

For a frozen dataclass Python compiles six methods, which takes longer than all that a command does with it, and `flk
status` has sixty of them. Of these classes it compiles `__init__` alone, and they share the others. To mypy they are
frozen dataclasses of Python: it finds who assigns to a field. Nothing finds that at run time.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import asdict, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

__all__ = ["StrEnum", "asdict", "dataclass", "field", "fields", "replace"]


class StrEnum(str, enum.Enum):
    """An enumeration whose members are written as their values: enum.StrEnum of Python 3.11."""

    def __str__(self) -> str:
        return str(self.value)


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool) -> Any:
        """Make a class of values; ``frozen`` says so to the reader, and to mypy."""

        def made(cls: type) -> type:
            if own := {"__eq__", "__hash__", "__repr__"} & vars(cls).keys():
                raise TypeError(f"{cls.__qualname__} has {min(own)}, which all values share: use dataclasses.dataclass")
            cls.__eq__, cls.__hash__, cls.__repr__ = _equal, _hash, _text
            return dataclasses.dataclass(eq=False, repr=False)(cls)

        return made


@cache
def _compared(cls: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(cls) if each.compare)


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in _compared(self.__class__))


def _equal(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _text(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"
