"""Slurm's lists of hosts and of tasks per node."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.discovery.variables import first_host, hosts, tasks_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login", ["login"]),
        ("a1,b2.site.org", ["a1", "b2.site.org"]),
        ("a[1-3,07],b12", ["a1", "a2", "a3", "a07", "b12"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[8-11]-ib", ["n8-ib", "n9-ib", "n10-ib", "n11-ib"]),
        ("r[0-1]n[2-3].x", ["r0n2.x", "r0n3.x", "r1n2.x", "r1n3.x"]),
        ("[1-2]", ["1", "2"]),
        ("a[1,1]", ["a1", "a1"]),
    ],
)
def test_lists_of_hosts(text: str, expected: list[str]) -> None:
    assert list(hosts(text)) == expected
    assert first_host(text) == expected[0]


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", ",a", "a,,b", "a[", "a[]", "a]", "a[1", "a[1-]", "a[-1]", "a[3-1]", "a[x]", "a[1-2-3]", "a[[1]]",
     "a b", "a[1]\n", "a[٣]", "a" + "[1]" * 6, "a[1-3],b["],
)  # fmt: skip
def test_texts_that_are_not_lists_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|range"):
        first_host(text)


def test_names_are_generated_lazily() -> None:
    assert first_host("a[0-999999999999],b") == "a0"
    assert list(itertools.islice(hosts("r[0-999999999]n[1-999999999]"), 2)) == ["r0n1", "r0n2"]


NAMES = st.lists(st.tuples(st.sampled_from(["a", "node-", "x9y"]), st.integers(0, 120)), min_size=1, max_size=30)


def compact(names: list[tuple[str, int]], width: int) -> str:
    """What Slurm would write for these hosts: neighbours with one prefix in one bracket, runs of numbers as a range."""
    items = []
    for prefix, group in itertools.groupby(names, key=lambda name: name[0]):
        runs: list[list[int]] = []
        for _, number in group:
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        pieces = [f"{run[0]:0{width}}" if len(run) == 1 else f"{run[0]:0{width}}-{run[-1]:0{width}}" for run in runs]
        items.append(f"{prefix}[{','.join(pieces)}]")
    return ",".join(items)


@given(NAMES, st.sampled_from([1, 4]))
def test_compact_lists_are_expanded(names: list[tuple[str, int]], width: int) -> None:
    expected = [f"{prefix}{number:0{width}}" for prefix, number in names]
    assert list(hosts(compact(names, width))) == expected
    assert list(hosts(",".join(expected))) == expected


@given(st.text(alphabet="a1-,[] .x(0", max_size=12))
def test_any_text_gives_hosts_or_a_value_error(text: str) -> None:
    try:
        names = list(itertools.islice(hosts(text), 100))
    except ValueError:
        return
    assert names
    assert all(names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", [4]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("1,4(x2)", [1, 4, 4]),
    ],
)
def test_tasks_per_node(text: str, expected: list[int]) -> None:
    for node, tasks in enumerate([*expected, 0]):
        assert tasks_of(text, node) == (tasks, len(expected), sum(expected))


def test_a_list_of_a_billion_nodes_is_not_expanded() -> None:
    assert tasks_of("3(x999999999),1", 999_999_999) == (1, 1_000_000_000, 2_999_999_998)


@pytest.mark.parametrize("text", ["", "2,", "2(x)", "2(x3", "x", "-2", "2.0", "2(3)", "1234567890", "٣"])
def test_texts_that_are_not_lists_of_tasks(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of tasks"):
        tasks_of(text, 0)
