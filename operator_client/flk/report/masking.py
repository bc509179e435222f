"""Replace the values of secrets that a job's object has in plain text, wherever they are in a report."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar, cast

from flk.observe.archive.redaction import hidden

T = TypeVar("T")


def masked(value: T, secrets: list[str]) -> T:
    """Return data, dataclasses among it, with ``***`` in place of the secrets and of passwords in addresses."""
    found: Any = value
    if isinstance(found, str) and not isinstance(found, enum.Enum):
        found = hidden(found, secrets)
    elif isinstance(found, dict):
        found = {key: masked(item, secrets) for key, item in found.items()}
    elif isinstance(found, list):
        found = [masked(item, secrets) for item in found]
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.init}
        found = dataclasses.replace(found, **{name: masked(item, secrets) for name, item in fields.items()})
    return cast(T, found)
