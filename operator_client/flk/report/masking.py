"""Replace the values of secrets that a job's object has in plain text, wherever they are in a report."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar, cast

from flk.kube import Object
from flk.observe.archive.redaction import REDACTED, without_password
from flk.secret_names import names_secret

T = TypeVar("T")
_LEAST: Final = 4  # characters of a value that is replaced: shorter ones are parts of other words
_ASSIGNED: Final = re.compile(r"-{0,2}([\w.-]+)=(.+)", re.DOTALL)


def secrets_of(job: Object | None) -> list[str]:
    """Return the values in a job's object that its variables and options name as secrets, the longest first."""
    found = {value for value in _secrets(job or {}) if len(value) >= _LEAST}
    return sorted(found, key=lambda value: (-len(value), value))


def masked(value: T, secrets: list[str]) -> T:
    """Return data, dataclasses among it, with ``***`` in place of the secrets and of passwords in addresses."""
    found: Any = value
    if isinstance(found, str) and not isinstance(found, enum.Enum):
        for secret in secrets:
            found = found.replace(secret, REDACTED)
        found = without_password(found)
    elif isinstance(found, dict):
        found = {key: masked(item, secrets) for key, item in found.items()}
    elif isinstance(found, list):
        found = [masked(item, secrets) for item in found]
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.init}
        found = dataclasses.replace(found, **{name: masked(item, secrets) for name, item in fields.items()})
    return cast(T, found)


def _secrets(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _secrets(item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key == "env" and isinstance(value, list):
            yield from (str(each.get("value") or "") for each in value if names_secret(str(each.get("name", ""))))
        elif key in ("command", "args") and isinstance(value, list):
            yield from _in_command([str(word) for word in value])
        else:
            yield from _secrets(value)


def _in_command(words: list[str]) -> Iterator[str]:
    """Yield the values of ``--api-token=x``, ``--api-token x`` and ``API_TOKEN=x``."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        assigned = _ASSIGNED.fullmatch(word)
        if assigned and names_secret(assigned[1]):
            yield assigned[2]
        elif assigned is None and word.startswith("-") and names_secret(word) and not following.startswith("-"):
            yield following
