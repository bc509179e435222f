"""The steps between two checkpoints, as a user gives them to ``flk submit``, a variable or `init`.

Standard library only: the client checks the value, and the ranks read it.
"""

from __future__ import annotations

from typing import Final

from flk_runtime.contract.strategies import AUTO
from flk_runtime.contract.variable import is_count

MOST: Final = 2**31 - 1


def check_interval(value: object, least: int = 0) -> int | str:
    """Return ``value`` if it is auto or so many steps, at least ``least``. Raises ValueError with what was expected."""
    if value == AUTO:
        return AUTO
    if is_count(value, least) and value <= MOST:
        return value
    raise ValueError(f"expected {AUTO} or a number of steps from {least} to {MOST}")


def parse_interval(text: str) -> int | str:
    """Return the number of steps that ``text`` is, or auto. Raises ValueError with what was expected."""
    return check_interval(int(text) if text.isdecimal() else text)
