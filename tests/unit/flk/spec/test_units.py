"""Quantities and durations, as Kubernetes and kubectl write them."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk.spec import units
from flk_runtime.contract import quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "1"),
        ("+1", "1"),
        ("500m", "0.5"),
        (".5", "0.5"),
        ("5.", "5"),
        ("1k", "1000"),
        ("2Ki", "2048"),
        ("1.5Gi", "1610612736"),
        ("1E", "1e18"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1e-3", "0.001"),
        ("100u", "0.0001"),
        ("7Ei", str(7 * 1024**6)),
    ],
)
def test_quantity(text: str, value: str) -> None:
    assert units.parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize(
    "text", ["", " 1", "1 ", "1\n", "-1", "1GB", "1gi", "Gi", "1K", "0x1", "1e", "٣", "8Ei", "1e99", "1,5"]
)
def test_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a quantity|larger than the largest quantity"):
        units.parse_quantity(text)


@pytest.mark.parametrize(
    ("amount", "said", "texts"),
    [
        (units.cpu, "must be more than 0", ("0", "0m")),
        (units.cpu, "must be a multiple of 1m", ("0.5m", "100u")),
        (units.cpu, "must be a number of cores like 4, 0.5 or 500m", ("lots", "4 cores", "4c")),
        (units.memory, "must be more than 0", ("0", "0Mi")),
        (units.memory, "must be a whole number of bytes", ("100m", "0.5")),
        (units.memory, "must be at least 1Mi", ("1", "1023Ki")),
        (units.memory, "must be a number of bytes like 512Mi", ("16GB", "16 GB", "1.5GiB", "2gi", "6400K", "big")),
    ],
)
def test_what_is_no_amount_is_refused(amount: Callable[[str], str], said: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=f"^{said}"):
            amount(text)


@given(st.integers(0, quantities.LONGEST))
def test_a_written_duration_reads_the_same(seconds: int) -> None:
    assert quantities.parse_duration(units.duration_text(seconds)) == seconds


@pytest.mark.parametrize(
    ("size", "text"), [(None, ""), (7, "7"), (1536, "1.5Ki"), (1023 << 20, "1023Mi"), (12.34 * 2**30, "12.3Gi")]
)
def test_bytes_are_in_the_largest_unit_that_they_fill(size: float | None, text: str) -> None:
    assert units.bytes_text(size) == text


@pytest.mark.parametrize("fraction", ["", ".1", ".12", ".123", ".1234", ".123456", ".12345678", ".123456789"])
@pytest.mark.parametrize("zone", ["Z", "+00:00", "+02:00"])
def test_times_have_fractions_of_any_length(fraction: str, zone: str) -> None:
    """A kubelet writes up to nine digits, and Python 3.10 reads three or six."""
    hours = 2 if zone == "+02:00" else 0
    seconds = 1767225600 - 3600 * hours + float(f"0{fraction}")
    assert units.timestamp(f"2026-01-01T00:00:00{fraction}{zone}") == pytest.approx(seconds, abs=2e-6)
