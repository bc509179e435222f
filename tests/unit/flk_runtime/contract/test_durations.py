"""Durations, alone and in hang timeouts: one grammar."""

from __future__ import annotations

import re

import pytest

from flk_runtime.contract.durations import PATTERN, parse_duration
from flk_runtime.contract.hang_timeout import parse_hang_timeout

VALID = [("75s", 75), ("1h30m", 5400), ("2d", 172_800), ("90", 90), ("0s", 0), ("1d1h1m1s", 90_061), ("1d1s", 86_401)]
INVALID = ["", "s", "1x", "1m1h", "1s1s", "-1s", "1.5h", "1 h", "1h\n", "99999d", "٣s", "2147483648"]


@pytest.mark.parametrize(("text", "seconds"), VALID)
def test_duration(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds
    assert parse_hang_timeout(text) == {"": seconds}
    assert parse_hang_timeout(f"1,save={text}") == {"": 1, "save": seconds}
    assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize("text", INVALID)
def test_no_duration(text: str) -> None:
    for parse, given in ((parse_duration, text), (parse_hang_timeout, text), (parse_hang_timeout, f"save={text}")):
        with pytest.raises(ValueError, match=r"must be a duration like 75s, 30m or 1h30m|longer than 68 years"):
            parse(given)


def test_variables_of_hang_timeouts_may_have_fractions_of_a_second() -> None:
    assert parse_hang_timeout("0.5,save=1.25") == {"": 0.5, "save": 1.25}
