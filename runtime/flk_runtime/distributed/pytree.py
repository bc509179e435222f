"""Trees: nested containers whose leaves are what the ranks exchange.

A mapping of any kind, a list, a tuple, a named tuple or a dataclass is a container; everything else is a leaf. Two
ranks that build the same tree must come to its leaves in the same order, so mappings are walked by sorted keys where
the keys can be written down, whatever the order in which they were put in.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

T = TypeVar("T")

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class Node(NamedTuple):
    """A place in a tree: its path in Python's notation, and what is there."""

    path: str
    value: Any
    container: str  # what kind of container is there; empty: a leaf


def walk(tree: object, path: str = "tree") -> Iterator[Node]:
    """All places of ``tree``, containers before what they hold, in an order that depends on keys and fields only."""
    kind = _kind(tree)
    yield Node(path, tree, kind)
    if kind:
        for suffix, _, child in _children(tree):
            yield from walk(child, path + suffix)


def replace(tree: T, leaf: Callable[[Any], Any]) -> T:
    """A tree of the same containers with ``leaf(value)`` in the place of each leaf, called in the order of `walk`.

    Containers are made anew and keep their types and the order of their keys; the given ones stay as they are.
    """
    if not _kind(tree):
        return cast(T, leaf(tree))
    return cast(T, _rebuilt(tree, {key: replace(child, leaf) for _, key, child in _children(tree)}))


def _kind(tree: object) -> str:
    if isinstance(tree, Mapping):
        return "a mapping"
    if isinstance(tree, tuple):
        return type(tree).__name__ if hasattr(tree, "_fields") else "a tuple"
    if isinstance(tree, list):
        return "a list"
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree).__name__
    return ""


def _children(tree: Any) -> list[tuple[str, Any, Any]]:
    """What a container holds: (suffix of the path, key, child)."""
    if isinstance(tree, Mapping):
        keys = list(tree)
        if all(map(_is_plain, keys)):
            return [(f"[{key!r}]", key, tree[key]) for key in sorted(keys, key=lambda k: (type(k).__name__, repr(k)))]
        # Such as parameters: what they look like differs between ranks, so their order has to be the same.
        return [(f"[<{type(key).__name__} {number}>]", key, tree[key]) for number, key in enumerate(keys)]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [
            (f".{name}", number, child) for number, (name, child) in enumerate(zip(tree._fields, tree, strict=True))
        ]
    if isinstance(tree, (list, tuple)):
        return [(f"[{number}]", number, child) for number, child in enumerate(tree)]
    return [(f".{field.name}", field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]


def _is_plain(key: object) -> bool:
    return type(key) in _PLAIN or (type(key) is tuple and all(map(_is_plain, key)))


def _rebuilt(tree: Any, children: dict[Any, Any]) -> Any:
    if isinstance(tree, Mapping):
        items = {key: children[key] for key in tree}  # in their own order
        if type(tree) is dict:
            return items
        if not hasattr(tree, "__setitem__"):
            return type(tree)(items)  # type: ignore[call-arg]
        twin = copy.copy(tree)  # keeps what a subclass has besides: a default factory, an attribute
        for key, child in items.items():
            twin[key] = child
        return twin
    if isinstance(tree, (list, tuple)):
        parts = [children[number] for number in range(len(tree))]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    twin = copy.copy(tree)
    for name, child in children.items():
        object.__setattr__(twin, name, child)  # frozen ones too
    return twin
