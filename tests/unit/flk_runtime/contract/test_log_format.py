"""Which lines are metrics, and what they say."""

from __future__ import annotations

import pytest

from flk_runtime.contract.log_format import MetricsLine, parse_metrics

FULL = '{"step": 7, "max_steps": 90, "loss": 1, "samples_per_s": 2.5, "tokens_per_s": 3, "mfu": 0.4, "comm": 0.1, '
FULL += '"data_wait": 0.2, "lr": 1e-4}'


@pytest.mark.parametrize("line", [FULL, FULL.encode()])
def test_all_keys_are_read(line: str | bytes) -> None:
    assert parse_metrics(line) == MetricsLine(
        7, 90, loss=1.0, samples_per_s=2.5, tokens_per_s=3.0, mfu=0.4, communication=0.1, data_wait=0.2
    )


OTHERS = [
    "",
    "step 3",
    '{"loss": 2}',
    '{"step": 1.5}',
    '{"step": true}',
    '{"step": 1',
    '["step"]',
    '{"step": 1e400}',
    '{"step": 99999999999999999999}',
    '{"a": {"step": 3}}',
    '{"step":' + "[" * 100_000,
]


@pytest.mark.parametrize("line", OTHERS, ids=lambda line: line[:20])
def test_other_lines_are_no_metrics(line: str) -> None:
    assert parse_metrics(line) is None
    assert parse_metrics(line.encode()) is None


def test_values_that_are_no_numbers_are_left_out() -> None:
    assert parse_metrics('{"step": 0, "loss": "low", "mfu": true, "total": false}') == MetricsLine(0)


@pytest.mark.parametrize("written", ['"nan"', '"-inf"', "NaN", '"Infinity"'])
def test_a_loss_that_is_no_number_is_told_with_the_first_such_step(written: str) -> None:
    found = parse_metrics(f'{{"step": 7, "loss": {written}, "mfu": 0.5}}')
    assert found
    assert (found.finite(), found.diverged(None), found.diverged(3)) == ({"mfu": 0.5}, 7, 3)
    assert (MetricsLine(8).diverged(7), MetricsLine(8, loss=1.0).diverged(7)) == (7, None)
