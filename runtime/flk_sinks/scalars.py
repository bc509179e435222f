"""scalars(): the numbers of a line of metrics, by names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flk_runtime.system.pytree import plain_value


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among ``values``, also those in mappings, whose names are joined by a slash.

    Tensors and arrays of one element are numbers. Everything else, such as texts and lists, is left out.
    """
    return {name: float(value) for name, value in flat(values) if isinstance(value, int | float)}


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values, also those in mappings, with names like ``optimizer/lr``."""
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}/")
            continue
        yield path, plain_value(value)
