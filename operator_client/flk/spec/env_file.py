"""Files of variables in docker's format: what `--env-file` reads.

A line is ``NAME=VALUE``, or ``NAME`` for a variable of this shell, with or without ``export`` before it. Quotes around
a value are not part of it: in double ones a backslash escapes, in single ones nothing does. Nothing is expanded. ``#``
begins a comment at the start of a line, and after a space behind a name or a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from flk.errors import UsageError

_LINE: Final = re.compile(r"(?:export\s+)?(?P<name>[^\s=#]+)(?:(?P<set>=(?P<value>.*))|\s+#.*)?")
_QUOTED: Final = {
    '"': re.compile(r'"(?P<text>(?:[^"\\]|\\.)*)"\s*(?:#.*)?'),
    "'": re.compile(r"'(?P<text>[^']*)'\s*(?:#.*)?"),
}
_COMMENT: Final = re.compile(r"(?:^|\s+)#.*$|\s+$")
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}


class Entry(NamedTuple):
    """A variable, its value, which is None if this shell has none, and where the file sets it: ``FILE:LINE``."""

    name: str
    value: str | None
    place: str


def read(path: str, environment: Mapping[str, str]) -> Iterator[Entry]:
    """Yield the variables in a file. Raises UsageError with the number of a line that is wrong, or sets one again."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise UsageError(f"--env-file: {path} cannot be read: {reason}") from None
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        place = f"{path}:{number}"
        match = _LINE.fullmatch(stripped)
        if match is None:
            raise UsageError(f"--env-file: {place} must be NAME=VALUE or NAME, without spaces around the '='")
        name = match["name"]
        if name in lines:
            raise UsageError(f"--env-file: {place} sets {name}, which line {lines[name]} has set already")
        lines[name] = number
        yield Entry(name, _value(match["value"], place) if match["set"] else environment.get(name), place)


def _value(text: str, place: str) -> str:
    quote = text[:1]
    if quote not in _QUOTED:
        return _COMMENT.sub("", text)
    match = _QUOTED[quote].fullmatch(text)
    if match is None:
        raise UsageError(f"--env-file: {place} begins with a {quote} that does not end the value; a value has one line")
    if quote == "'":
        return match["text"]
    return re.sub(r"\\(.)", lambda escaped: _ESCAPES.get(escaped[1], escaped[1]), match["text"])
