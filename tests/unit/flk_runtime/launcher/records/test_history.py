"""Which nodes count as bad, by the attempts that failed on them."""

from __future__ import annotations

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.records.history import quarantine

HOUR = 3600.0


def attempts(*kinds: tuple[Kind, float], node: str = "node-a") -> list[Attempt]:
    """Attempts that ended with these kinds of failures, at these hours."""
    return [Attempt(n, 0.0, hour * HOUR, Failure(kind, 1, node=node)) for n, (kind, hour) in enumerate(kinds)]


@pytest.mark.parametrize(
    ("history", "bad"),
    [
        (attempts((Kind.IO, 1)), False),
        (attempts((Kind.IO, 1), (Kind.LOST, 2)), True),
        (attempts((Kind.EXCEPTION, 1), (Kind.EXCEPTION, 2)), False),
        (attempts((Kind.UNHEALTHY, 1)), True),
        (attempts((Kind.UNHEALTHY, 1), node=""), False),
        (attempts((Kind.IO, 1), (Kind.IO, 26)), False),  # the first one is forgotten
        (attempts((Kind.UNHEALTHY, 1), (Kind.EXCEPTION, 24)), True),
        (attempts((Kind.UNHEALTHY, 1), (Kind.EXCEPTION, 26)), False),
        ([*attempts((Kind.UNHEALTHY, 1)), Attempt(1, 26 * HOUR)], False),  # an attempt runs on it, a day later
        ([], False),
    ],
)
def test_a_node_is_bad_for_a_day_after_two_failures_or_a_fault(history: list[Attempt], bad: bool) -> None:
    assert [each.node for each in quarantine(history, 24 * HOUR)] == ["node-a"] * bad
    assert quarantine(history, 0) == []


def test_a_quarantine_says_why_and_ends_when_too_few_failures_are_remembered() -> None:
    history = attempts((Kind.IO, 1), (Kind.LOST, 2), (Kind.IO, 5), (Kind.EXCEPTION, 6))
    (found,) = quarantine(history, 24 * HOUR)
    assert found.until == (2 + 24) * HOUR  # then only the failure of the fifth hour is left
    assert found.reason == history[2].failure.summary  # type: ignore[union-attr]
