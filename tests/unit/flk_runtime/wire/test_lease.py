"""How long an end of a connection may be silent."""

from __future__ import annotations

import pytest

from flk_runtime.wire import LEASE, Lease


@pytest.mark.parametrize(("now", "expected"), [(100.0, ""), (115.0, ""), (115.6, "it was silent for 16 s")])
def test_silence_counts_after_the_lease(now: float, expected: str) -> None:
    assert Lease(15.0).silence(heard=100.0, now=now) == expected


def test_an_end_says_three_times_in_a_lease_that_it_is_there() -> None:
    assert Lease(15.0).interval * 3 == 15.0
    assert LEASE == 15.0
