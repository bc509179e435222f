"""Slurm's lists of hosts and of tasks per node."""

from __future__ import annotations

import pytest

from flk_runtime.discovery.variables import first_host, tasks_of
from flk_runtime.errors import DiscoveryError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login", "login"),
        ("a1,b2.site.org", "a1"),
        ("a[1-3,07],b12", "a1"),
        ("n[098-101]", "n098"),
        ("n[8-11]-ib", "n8-ib"),
        ("r[0-1]n[2-3].x", "r0n2.x"),
        ("[1-2]", "1"),
    ],
)
def test_the_first_host_of_a_list(text: str, expected: str) -> None:
    assert first_host("HOSTS", text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ",", ",a", "a[", "a[]", "a]", "a[1", "a[-1]", "a[x]", "a[[1]]", "a b", "a[1]\n", "a[٣]"],
)
def test_texts_that_are_not_lists_of_hosts(text: str) -> None:
    with pytest.raises(DiscoveryError, match="list of hosts"):
        first_host("HOSTS", text)


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
        assert tasks_of("TASKS", text, node) == (tasks, len(expected), sum(expected))


def test_a_list_of_a_billion_nodes_is_not_expanded() -> None:
    assert tasks_of("TASKS", "3(x999999999),1", 999_999_999) == (1, 1_000_000_000, 2_999_999_998)


@pytest.mark.parametrize("text", ["", "2,", "2(x)", "2(x3", "x", "-2", "2.0", "2(3)", "1234567890", "٣"])
def test_texts_that_are_not_lists_of_tasks(text: str) -> None:
    with pytest.raises(DiscoveryError, match="not a number of tasks"):
        tasks_of("TASKS", text, 0)
