"""Numbers as text, for programs and for people."""

from __future__ import annotations

import re

import pytest

from flk_runtime.contract.quantities import (
    DURATION,
    format_ranges,
    numbered,
    often,
    parse_duration,
    parse_ranges,
    size_text,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1 << 10, "1 KiB"),
        (1023 << 20, "1023 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 50, "5 PiB"),
    ],
)
def test_a_size_is_in_the_largest_unit_that_it_fills(size: int, text: str) -> None:
    assert size_text(size) == text


def test_times_are_counted() -> None:
    assert [often(times) for times in (1, 2, 3)] == ["1 time", "twice", "3 times"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([7], "7"), ([0, 1], "0-1"), ([0, 1, 2, 5], "0-2,5"), ([0, 4, 2, 3], "0,4,2-3")]
)
def test_numbers_are_written_and_read_in_their_order(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text
    assert parse_ranges(text) == numbers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "rank 3"),
        ([3, 3], "rank 3"),
        ([1, 0], "ranks 0-1"),
        ([5, 3], "ranks 3, 5"),
        ([7, 0, 1, 2], "ranks 0-2, 7"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ([*range(0, 32, 4), *range(40, 50)], "ranks 0, 4, 8, 12, 16, 20, 24, 28 and 10 more"),
    ],
)
def test_numbers_for_people_have_a_noun_and_long_lists_are_cut(numbers: list[int], text: str) -> None:
    assert numbered("rank", numbers) == text


VALID = [("75s", 75), ("1h30m", 5400), ("2d", 172_800), ("90", 90), ("0s", 0), ("1d1h1m1s", 90_061), ("1d1s", 86_401)]
INVALID = ["", "s", "1x", "1m1h", "1s1s", "-1s", "step=5m", "1.5h", "1 h", "1h\n", "99999d", "٣s", "2147483648"]


@pytest.mark.parametrize(("text", "seconds"), VALID)
def test_duration(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds
    assert re.fullmatch(DURATION, text)


@pytest.mark.parametrize("text", INVALID)
def test_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a duration like 75s, 30m or 1h30m|longer than 68 years"):
        parse_duration(text)
