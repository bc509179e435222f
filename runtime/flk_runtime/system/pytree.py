"""Pytrees: nested containers, walked in an order that is the same on all ranks, and rebuilt with other leaves.

Containers are mappings of any kind, lists, tuples, named tuples and dataclasses; everything else is a leaf. Mappings
are walked by sorted keys where the keys are plain values, so insertion order does not matter. torch's own
torch.utils._pytree is private, and takes mappings other than dict, and dataclasses, as leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

T = TypeVar("T")

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class Node(NamedTuple):
    """A container or a leaf of a tree, with its path in Python's notation (``tree['a'][0].x``)."""

    path: str
    value: Any
    container: str  # the kind of container; empty for a leaf


def walk(tree: object, path: str = "tree") -> Iterator[Node]:
    """Yield all nodes of ``tree``, containers before their children; the order depends on keys and fields only."""
    kind = _kind(tree)
    yield Node(path, tree, kind)
    if kind:
        for suffix, _, child in _children(tree):
            yield from walk(child, path + suffix)


def leaves(tree: object) -> list[Any]:
    """The leaves of ``tree`` in the order of `walk`."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def map_leaves(tree: T, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda value: False) -> T:
    """A new tree with ``function(leaf)`` in place of each leaf; ``function`` is called in the order of `walk`.

    Containers are copies of the same types and with the same order of keys. What ``is_leaf`` is true of counts as a
    leaf, even if it is a container.
    """
    if is_leaf(tree) or not _kind(tree):
        return cast(T, function(tree))
    children = {key: map_leaves(child, function, is_leaf) for _, key, child in _children(tree)}
    return cast(T, _rebuild(tree, children))


def _collect(tree: object, found: list[Any]) -> None:
    """Add the leaves of ``tree`` to ``found``: `walk` without paths, which a forward pass has no time for."""
    if not _kind(tree):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for child in tree:
            _collect(child, found)
    else:
        for _, _, child in _children(tree):
            _collect(child, found)


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
    """The children of a container as (suffix of the path, key, child)."""
    if isinstance(tree, Mapping):
        keys = list(tree)
        if all(map(_is_plain, keys)):
            return [(f"[{key!r}]", key, tree[key]) for key in sorted(keys, key=lambda k: (type(k).__name__, repr(k)))]
        # Keys such as parameters have a different repr() on each rank: they must be inserted in the same order.
        return [(f"[<{type(key).__name__} {number}>]", key, tree[key]) for number, key in enumerate(keys)]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [
            (f".{name}", number, child) for number, (name, child) in enumerate(zip(tree._fields, tree, strict=True))
        ]
    if isinstance(tree, (list, tuple)):
        return [(f"[{number}]", number, child) for number, child in enumerate(tree)]
    return [(f".{field.name}", field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]


def _is_plain(key: object) -> bool:
    """Whether a key has the same repr() on all ranks."""
    return type(key) in _PLAIN or (type(key) is tuple and all(map(_is_plain, key)))


def _rebuild(tree: Any, children: dict[Any, Any]) -> Any:
    """A container like ``tree`` with other children, given by their keys in `_children`."""
    if isinstance(tree, Mapping):
        items = {key: children[key] for key in tree}  # in the order of the given mapping
        if type(tree) is dict:
            return items
        if not isinstance(tree, dict) and not hasattr(tree, "__copy__"):
            return type(tree)(items)  # type: ignore[call-arg]
        twin: Any = copy.copy(tree)  # keeps the attributes of a subclass: a default factory, say
        for key, child in items.items():
            twin[key] = child
        return twin
    if isinstance(tree, (list, tuple)):
        parts = [children[number] for number in range(len(tree))]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    twin = copy.copy(tree)
    for name, child in children.items():
        object.__setattr__(twin, name, child)  # frozen dataclasses too
    return twin


def plain_value(value: Any) -> Any:
    """A tensor or an array as a number, if it has one element, else as lists; any other value as it is.

    This waits for the device of a tensor.
    """
    if type(value) not in _PLAIN and hasattr(value, "tolist"):  # NumPy's numbers have it too
        value = value.tolist()
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    return value
