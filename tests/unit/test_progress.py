"""The page of memory that a rank shares with its launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flk_runtime import contract
from flk_runtime.system import progress
from flk_runtime.system.progress import Phase, ProgressPage


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test is a rank of its own."""
    progress.own_page.cache_clear()
    yield
    progress.own_page.cache_clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[-1])
    return times


def test_a_new_page_says_that_nothing_has_happened(tmp_path: Path) -> None:
    page = ProgressPage.create(tmp_path / "page")
    assert (page.phase, page.step, page.saved, page.boundary, page.target) == (Phase.STARTING, -1, -1, -1, -1)
    assert (page.waiting, page.hold, page.progress_time, page.step_seconds) == (0, 0, 0.0, 0.0)


def test_both_sides_see_each_others_fields(tmp_path: Path) -> None:
    launcher = ProgressPage.create(tmp_path / "page")
    rank = ProgressPage.open(str(tmp_path / "page"))
    rank.phase, rank.step, rank.step_seconds = Phase.TRAINING, 1 << 40, 0.25
    launcher.hold, launcher.target = 1, 7
    assert (launcher.phase, launcher.step, launcher.step_seconds) == (Phase.TRAINING, 1 << 40, 0.25)
    assert (rank.hold, rank.target) == (1, 7)


def test_a_process_that_a_rank_starts_sends_heartbeats_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ProgressPage.create(tmp_path / "page")
    monkeypatch.setenv(contract.PROGRESS, str(tmp_path / "page"))
    subprocess.run([sys.executable, "-c", "import flk_runtime; flk_runtime.heartbeat()"], check=True, env=os.environ)
    first = launcher.progress_time
    assert first > 0
    progress.heartbeat()
    assert launcher.progress_time >= first


def test_the_mean_step_time_follows_the_steps(clock: list[float]) -> None:
    page = ProgressPage.private()
    page.record_step(1)
    assert (page.step, page.step_time, page.step_seconds) == (1, 100.0, 0.0)
    clock.append(102.0)
    page.record_step(2)
    assert page.step_seconds == 2.0
    for number in range(100):
        clock.append(clock[-1] + 1.0)
        page.record_step(3 + number)
    assert page.step_seconds == pytest.approx(1.0, abs=0.001)


def test_a_heartbeat_between_steps_is_not_a_step(clock: list[float]) -> None:
    page = progress.own_page()
    page.record_step(1)
    clock.append(101.0)
    progress.heartbeat()
    assert page.progress_time == 101.0
    clock.append(104.0)
    page.record_step(2)
    assert (page.step_seconds, page.progress_time) == (4.0, 104.0)


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_rank_whose_launcher_left_no_page_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "page"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(contract.PROGRESS, str(path))
    page = progress.own_page()
    page.record_step(5)
    assert (page.step, page.hold) == (5, 0)


def test_without_a_launcher_the_page_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.PROGRESS, raising=False)
    assert progress.own_page() is progress.own_page()
    assert progress.own_page().hold == 0
