"""The shares of a rank's time."""

from __future__ import annotations

from pathlib import Path

from flk_runtime.metrics.logging import Shares
from flk_runtime.shared.progress import ProgressPage


def test_the_launcher_reads_the_share_of_waiting_for_data_of_the_latest_line() -> None:
    page = ProgressPage.private()
    shares = Shares(page)
    assert page.data_wait == -1  # not known before a line
    shares.add_wait(1000.0)
    assert shares.read() == {"data_wait": 1.0}
    assert page.data_wait == 1
    assert shares.read() == {"data_wait": 0.0}
    assert page.data_wait == 0


def test_communication_is_told_only_where_it_is_measured(tmp_path: Path) -> None:
    page = ProgressPage.create(tmp_path / "page")
    shares = Shares(page)
    assert shares.read()["comm"] == 0.0
    page.samples, page.pending_samples = 4, 1
    assert shares.read()["comm"] == 0.25
    assert shares.read()["comm"] == 0.25  # without a new sample
    page.untold = 1
    assert "comm" not in shares.read()
