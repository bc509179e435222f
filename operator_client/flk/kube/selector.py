"""Label selectors: the forms that the API server understands."""

from __future__ import annotations

import re
from typing import Final

from flk.errors import UsageError

_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}"
_VALUE: Final = rf"(?:{_NAME})?"
_SPACE: Final = r"[ \t]*"
_VALUES: Final = rf"\({_SPACE}{_VALUE}(?:{_SPACE},{_SPACE}{_VALUE})*{_SPACE}\)"
_REQUIREMENT: Final = "|".join(
    (
        rf"!?{_SPACE}{_KEY}",
        rf"{_KEY}{_SPACE}(?:==?|!=){_SPACE}{_VALUE}",
        rf"{_KEY}[ \t]+(?:in|notin){_SPACE}{_VALUES}",
        rf"{_KEY}{_SPACE}[<>]{_SPACE}[0-9]+",
    )
)
_SELECTOR: Final = re.compile(rf"{_SPACE}(?:{_REQUIREMENT})(?:{_SPACE},{_SPACE}(?:{_REQUIREMENT}))*{_SPACE}")


def check_selector(selector: str) -> None:
    """Raise UsageError for a label selector that the API server would refuse."""
    if not _SELECTOR.fullmatch(selector):
        raise UsageError(
            f"--selector: must be labels as kubectl takes them (is {selector!r})",
            hint="such as -l team=nlp, -l 'team=nlp,!done' or -l 'team in (nlp, vision)'",
        )
