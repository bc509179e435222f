"""Text for messages."""

from __future__ import annotations

from collections.abc import Sequence


def last_line(lines: Sequence[str]) -> str:
    """The last of the lines that is not blank, without the space around it; empty if all are."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def last_exception(text: str) -> str:
    """The line that ends the last Python traceback in ``text``, as ``ValueError: bad sample``; empty without one."""
    found, inside = "", False
    for line in text.splitlines():
        if line.endswith("Traceback (most recent call last):"):
            inside = True
        elif inside and line and not line[0].isspace():
            found, inside = line, False
    return found


def text_of(value: object) -> str:
    """``str(value)``, or a text in its place if that raises."""
    try:
        return str(value)
    except Exception as error:
        return f"<its text raised {type(error).__name__}>"
