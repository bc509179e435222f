"""Trees are walked in an order that all ranks come to, and rebuilt as they were."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.distributed.consistency import difference
from flk_runtime.distributed.pytree import replace, walk

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


def leaves(tree: object) -> list[Any]:
    return [node.value for node in walk(tree) if not node.container]


@given(tree=TREES)
def test_it_is_rebuilt_with_other_leaves_in_their_places(tree: Any) -> None:
    assert replace(tree, lambda leaf: leaf) == tree
    numbers = iter(range(100))
    numbered = replace(tree, lambda leaf: next(numbers))
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
    assert list(replace(other, lambda leaf: leaf)) == keys  # which stays


def test_paths_are_written_as_python_does() -> None:
    tree = {"a": [Point(1, Pair(2, "x"))], 3: ()}
    assert [node.path for node in walk(tree)] == [
        *("tree", "tree[3]", "tree['a']", "tree['a'][0]", "tree['a'][0].x"),
        *("tree['a'][0].y", "tree['a'][0].y.one", "tree['a'][0].y.other"),
    ]


def test_the_first_difference_is_named() -> None:
    here = [("t", "a list"), ("t[0]", "a"), ("t[1]", "b")]
    assert difference(here, [*here[:2], ("t[1]", "c")], "rank 0", "rank 1") == "t[1] is b on rank 0, and c on rank 1"
    assert difference(here, here[:2], "rank 0", "rank 1") == "t[1] is on rank 0 (b), and not on rank 1"
    assert difference(here[:2], here, "ranks 0, 2", "rank 1") == "t[1] is on rank 1 (b), and not on ranks 0, 2"
    assert difference(here, here[::-1], "rank 0", "rank 1") == "the same leaves in another order"
