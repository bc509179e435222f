"""Pytrees are walked in an order that is the same on all ranks, and rebuilt with the same containers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.distributed.consistency import difference
from flk_runtime.system.pytree import leaves, map_leaves, walk

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Pair:
    one: Any
    other: Any


LEAVES = st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
KEYS = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict)
        | st.builds(Point, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@given(tree=TREES)
def test_leaves_are_replaced_in_their_places(tree: Any) -> None:
    assert map_leaves(tree, lambda leaf: leaf) == tree
    numbers = iter(range(100))
    numbered = map_leaves(tree, lambda leaf: next(numbers))
    assert leaves(numbered) == list(range(len(leaves(tree))))
    paths = [(node.path, node.container) for node in walk(tree)]
    assert [(node.path, node.container) for node in walk(numbered)] == paths
    assert len(set(paths)) == len(paths)


@given(items=st.dictionaries(KEYS, TREES, max_size=5), order=st.randoms())
def test_the_order_of_keys_does_not_matter(items: dict[Any, Any], order: Any) -> None:
    keys = list(items)
    order.shuffle(keys)
    other = {key: items[key] for key in keys}
    assert [node.path for node in walk(other)] == [node.path for node in walk(items)]
    assert list(map_leaves(other, lambda leaf: leaf)) == keys  # in the given order


def test_paths_are_written_as_python_does() -> None:
    tree = {"a": [Point(1, Pair(2, "x"))], 3: ()}
    assert [node.path for node in walk(tree)] == [
        *("tree", "tree[3]", "tree['a']", "tree['a'][0]", "tree['a'][0].x"),
        *("tree['a'][0].y", "tree['a'][0].y.one", "tree['a'][0].y.other"),
    ]


def test_the_first_difference_is_named() -> None:
    here = [("t", "a list"), ("t[0]", "a"), ("t[1]", "b")]
    assert difference(here, [*here[:2], ("t[1]", "c")], "rank 0", "rank 1") == "t[1] is b on rank 0, and c on rank 1"
    assert difference(here, here[:2], "rank 0", "rank 1") == "t[1] is b on rank 0, and missing on rank 1"
    assert difference(here[:2], here, "ranks 0, 2", "rank 1") == "t[1] is missing on ranks 0, 2, and b on rank 1"
    assert "another order" in difference(here, here[::-1], "rank 0", "rank 1")


class Moved(list[int]):
    """A container with a method of its own, as torch's PackedSequence."""


def test_a_container_can_be_a_leaf() -> None:
    tree = {"a": Moved([1, 2]), "b": [Moved([3]), 4]}
    counted = map_leaves(tree, lambda leaf: len(leaf) if isinstance(leaf, Moved) else leaf, lambda v: type(v) is Moved)
    assert counted == {"a": 2, "b": [1, 4]}


def test_mappings_keep_their_type_and_attributes() -> None:
    counts = collections.Counter(a=1)
    assert type(map_leaves(counts, lambda leaf: leaf + 1)) is collections.Counter
    default = collections.defaultdict(list, a=1)
    assert map_leaves(default, str)["missing"] == []
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert map_leaves(state, lambda leaf: leaf)._metadata == state._metadata  # type: ignore[attr-defined]


class Items(Mapping[str, Any]):
    """A mapping whose items are in an attribute, and which says nothing about copies."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.mark.parametrize("kind", [Items, collections.UserDict])
def test_a_mapping_that_is_no_dictionary_is_made_anew(kind: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    tree = kind({"a": 1, "b": kind({"c": 2})})
    copied = map_leaves(tree, str)
    assert (copied["a"], dict(copied["b"])) == ("1", {"c": "2"})
    assert (tree["a"], dict(tree["b"])) == (1, {"c": 2})
    assert type(copied) is type(tree)
