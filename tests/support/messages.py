"""Messages with other values than expected."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

# Values of each type of JSON, and those of a type that are rare.
VALUES: list[object] = [
    None, True, 0, -1, 2**53, 10**400, 0.5, float("inf"), "", "soon", "0-x", "1,1,1", "0-" + "9" * 30,
    [], [[]], ["soon"], {}, {"1": 2},
]  # fmt: skip


def replaced(value: object) -> Iterator[object]:
    """The same JSON, with one value in it replaced by each of VALUES, one after the other."""
    yield from VALUES
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: each} for each in replaced(inner))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from ([*value[:index], each, *value[index + 1 :]] for each in replaced(inner))


def check_types(value: Any, hint: Any) -> None:
    """Fail unless a value has the type of its annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        assert value is None or [check_types(value, each) for each in args if each is not type(None)]
    elif origin in (list, tuple, Sequence):
        assert isinstance(value, origin)
        each = args * len(value) if origin is not tuple else args[:1] * len(value) if args[-1] is Ellipsis else args
        for item, inner in zip(value, each, strict=True):
            check_types(item, inner)
    elif origin in (dict, Mapping):
        assert isinstance(value, dict)
        for key, item in value.items():
            check_types(key, args[0])
            check_types(item, args[1])
    elif hint is not Any:
        assert type(value) is hint
        if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
            for name, inner in get_type_hints(hint).items():
                check_types(getattr(value, name), inner)
        elif hint is int:
            assert abs(value) < 2**63
