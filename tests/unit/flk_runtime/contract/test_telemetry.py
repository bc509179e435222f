"""The telemetry in the archived record: a few kilobytes, whatever the job."""

from __future__ import annotations

import base64
import random
import zlib
from dataclasses import replace

import pytest

from flk_runtime.contract.log_format import Measured
from flk_runtime.contract.status import Phase, RankStatus
from flk_runtime.contract.telemetry import (
    ARCHIVE_LIMIT,
    HISTORY_LIMIT,
    GpuUsage,
    PodUsage,
    Sample,
    Telemetry,
    pack_telemetry,
    unpack_telemetry,
)


def large() -> Telemetry:
    """Telemetry with as much as it may have, of values that do not compress well."""
    random.seed(1)
    value = random.random
    history = [
        Sample(
            1.7e9 + 1000 * value() + step * 1000,
            3,
            step * 10,
            value(),
            value(),
            step % 7,
            **{name: value() for name in Measured().measured()},
        )
        for step in range(HISTORY_LIMIT)
    ]
    ranks = [
        RankStatus(n, n // 8, 10, Phase.TRAINING, value(), value(), value(), int(value() * 1e10), value())
        for n in range(256)
    ]
    gpus = [GpuUsage(value(), int(value() * 1e10), 80 << 30) for _ in range(8)]
    pods = [PodUsage(n, f"job-worker-{n}", f"node-{n}", 1.7e9, value(), 8.0, 1, 2, gpus=gpus) for n in range(256)]
    return Telemetry(1.7e9, 3, 5000, history, ranks, pods, {"strategy": "fsdp2"})


def test_the_largest_fits_and_keeps_the_curve_and_the_worst() -> None:
    whole = large()
    text = pack_telemetry(whole)
    assert 0 < len(text) <= ARCHIVE_LIMIT
    found = unpack_telemetry(text)
    assert found is not None
    assert (found.attempt, found.total_steps, found.settings) == (3, 5000, {"strategy": "fsdp2"})
    assert len(found.history) >= 30
    assert found.history[0].step == 0
    assert found.history[-1].step == whole.history[-1].step
    kept = {sample.step: sample for sample in whole.history}
    assert all(each.loss == pytest.approx(kept[each.step].loss, rel=1e-3) for each in found.history)
    assert found.ranks[0].rank == 0
    assert found.pods[0].gpus[0].memory_total == 80 << 30


def test_the_smallest_is_as_it_was() -> None:
    empty = Telemetry(12.0)
    assert unpack_telemetry(pack_telemetry(empty)) == empty


def test_a_large_loss_costs_no_history() -> None:
    sample = Sample(1234567.8, 1, 2, loss=1e20, samples_per_s=123456.7, memory=6e10)
    found = unpack_telemetry(pack_telemetry(Telemetry(1234567.8, history=[sample])))
    assert found == Telemetry(1234568.0, history=[replace(sample, time=1234568.0, samples_per_s=123500.0)])


@pytest.mark.parametrize(
    "text", ["", "?", base64.b64encode(b"abc").decode(), base64.b64encode(zlib.compress(b"[]")).decode()]
)
def test_other_text_is_no_telemetry(text: str) -> None:
    assert unpack_telemetry(text) is None


def test_a_text_that_inflates_without_end_is_not_read() -> None:
    assert unpack_telemetry(base64.b64encode(zlib.compress(b" " * 50_000_000 + b"{}")).decode()) is None
