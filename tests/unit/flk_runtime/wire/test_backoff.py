"""Delays between two tries: they double, and have a random part."""

from __future__ import annotations

from flk_runtime.wire import Backoff


def test_delays_double_up_to_the_longest_and_begin_anew() -> None:
    backoff = Backoff(0.1, 0.5, lambda: 0.5)
    assert [backoff.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next() == 0.1


def test_each_delay_is_half_to_one_and_a_half_of_that() -> None:
    numbers = iter([0.0, 1.0, 0.25])
    backoff = Backoff(1.0, 8.0, lambda: next(numbers))
    assert [backoff.next() for _ in range(3)] == [0.5, 3.0, 3.0]
