"""Find the errors in the lines of one rank or one process: Python's tracebacks, and the last words of native code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flk_runtime.contract.failure_text import kind_of_text

# torch puts the rank before each line of a traceback that ends a process.
_PREFIX: Final = re.compile(r"\[rank\d+\]: ?")
_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_EXCEPTION: Final = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")
_NATIVE: Final = re.compile(
    r"(?P<type>Fatal Python error|terminate called after throwing an instance of|Segmentation fault|Bus error|"
    r"Illegal instruction|Aborted)\b:? ?(?P<message>.*)"
)


@dataclass(frozen=True)
class LoggedError:
    """An error in a log. ``begin`` and ``end`` are the indexes of its first line and of the line after its last."""

    begin: int
    end: int
    type: str  # class name of the exception, or the kind of a native error
    message: str
    secondary: bool  # a consequence of a peer's end: the connection to it broke

    @property
    def summary(self) -> str:
        """Type and message in one line."""
        return f"{self.type}: {self.message}" if self.message else self.type


def find_errors(lines: Sequence[str]) -> list[LoggedError]:
    """Return the errors in the lines of one process, in their order. Chained exceptions are one error: the last."""
    errors: list[LoggedError] = []
    chained = False  # the next traceback belongs to the last error
    texts = [_PREFIX.sub("", line, count=1) if line.startswith("[rank") else line for line in lines]
    position = 0
    while position < len(texts):
        text = texts[position]
        error = None
        if text.lstrip(" |+-") == _TRACEBACK:
            error = _traceback(texts, position)
        elif not text.startswith((" ", "\t")) and (match := _NATIVE.match(text)):
            secondary = kind_of_text("", match["message"]).meaning.secondary
            error = LoggedError(position, position + 1, match["type"], match["message"].strip(), secondary)
        if error is None:
            chained = chained or text.strip() in _CHAINED
            position += 1
            continue
        if chained and errors:
            first = errors.pop()
            error = replace(error, begin=first.begin, secondary=first.secondary or error.secondary)
        errors.append(error)
        chained = False
        position = error.end
    return errors


def _traceback(texts: Sequence[str], begin: int) -> LoggedError | None:
    """Return the error whose traceback begins at an index; None if the log ends in the middle of it."""
    indent = len(texts[begin]) - len(texts[begin].lstrip(" "))
    for position, text in _following(texts, begin):
        if text[:indent].strip() == "" and not text[indent : indent + 1].isspace() and text.strip():
            match = _EXCEPTION.match(text[indent:])
            if match is None:
                return None
            name, message = match["type"].rpartition(".")[2], match["message"] or ""
            secondary = kind_of_text(name, message).meaning.secondary
            return LoggedError(begin, position + 1, name, message.strip(), secondary)
    return None


def _following(texts: Sequence[str], begin: int) -> Iterator[tuple[int, str]]:
    return ((position, texts[position]) for position in range(begin + 1, len(texts)))
