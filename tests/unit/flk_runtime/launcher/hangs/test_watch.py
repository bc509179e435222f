"""What a launcher tells the leader about the progress of its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk_runtime.contract import user_env
from flk_runtime.contract.status import NEVER, Phase
from flk_runtime.contract.telemetry import PodStatus
from flk_runtime.launcher.hangs import snapshot
from flk_runtime.launcher.hangs.watch import Watch, Watched
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.progress import ProgressPage


@dataclass
class Rank:
    """A rank that has done nothing yet."""

    progress: ProgressPage
    environment: dict[str, str]
    rank: int = 0
    pid: int = 0
    output_time: float = 0.0


@dataclass
class Received:
    """When the launcher received bytes of a checkpoint last."""

    at: float = 0.0
    statuses: list[PodStatus] = field(default_factory=list)


@pytest.mark.parametrize(("phase", "counts"), [(Phase.RESTORING, True), (Phase.SAVING, True), (Phase.TRAINING, False)])
def test_bytes_of_a_checkpoint_are_progress_of_a_rank_that_restores_or_stores_it(
    tmp_path: Path, phase: Phase, counts: bool
) -> None:
    received = Received()
    watch = Watch(Settings(("train.py",)), received.statuses.append, lambda *_: None, lambda: received.at)
    rank = Rank(ProgressPage.private(), {user_env.HEARTBEAT: str(tmp_path / "none")})
    with rank.progress.during(phase):
        watch.update(0, [rank])
        received.at = time.monotonic()
        watch.update(0, [rank])
    assert rank.progress.phase == Phase.STARTING
    before, after = (status.ranks[0].beat for status in received.statuses)
    assert before == NEVER
    assert (after < NEVER) == counts


@pytest.mark.parametrize(
    ("phase", "step", "collective", "expected"),
    [
        (Phase.STARTING, False, False, Phase.STARTING),
        (Phase.STARTING, False, True, Phase.TRAINING),  # a script without flk's library
        (Phase.RENDEZVOUS, False, True, Phase.RENDEZVOUS),
        (Phase.TRAINING, False, True, Phase.FIRST_STEP),
        (Phase.TRAINING, True, True, Phase.TRAINING),
        (Phase.EVALUATING, True, True, Phase.EVALUATING),
        (Phase.SAVING, True, True, Phase.SAVING),
        (Phase.RESTORING, False, True, Phase.RESTORING),
        (Phase.MEETING, True, True, Phase.MEETING),
    ],
)
def test_the_status_has_the_phase_of_the_page(
    tmp_path: Path, phase: Phase, step: bool, collective: bool, expected: Phase
) -> None:
    watch = Watch(Settings(("train.py",), pod=2), lambda _: None, lambda *_: None, float)
    rank = Rank(ProgressPage.private(), {user_env.HEARTBEAT: str(tmp_path / "none")}, rank=5)
    if step:
        rank.progress.record_step(3)
    rank.progress.phase, rank.progress.collective_time = phase, float(collective)
    watch.update(0, [rank])
    (status,) = watch.ranks
    assert (status.rank, status.pod, status.phase, status.step) == (5, 2, expected, 3 if step else -1)
    assert (status.step_seconds, status.data_wait, status.saved) == (None, None, -1)


def test_a_rank_whose_process_has_ended_has_no_memory_that_is_known(tmp_path: Path) -> None:
    statuses: list[PodStatus] = []
    meter = SimpleNamespace(latest=None)
    watch = Watch(Settings(("train.py",)), statuses.append, lambda *_: None, lambda: 0.0, meter)
    watch.update(0, [Rank(ProgressPage.private(), {user_env.HEARTBEAT: str(tmp_path / "none")})])
    assert statuses[0].ranks[0].memory is None


def test_a_process_that_ends_meanwhile_has_no_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: str) -> None:
        raise FileNotFoundError(path)

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, gone)
    assert snapshot.cpu_seconds(os.getpid()) > 0


@pytest.fixture
def oddly_named() -> Iterator[None]:
    """This process has a name that is not UTF-8, since the kernel has cut it."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes("ab训练进程".encode()[:13])
    yield
    name.write_bytes(before.strip())


@pytest.mark.usefixtures("oddly_named")
def test_a_process_may_have_any_name() -> None:
    assert snapshot.cpu_seconds(os.getpid()) > 0
    assert not snapshot._handles_signal(os.getpid())


@pytest.mark.parametrize("clock", [3600.0, -3600.0])
def test_a_file_that_is_touched_is_progress_at_any_time_that_the_clock_shows(tmp_path: Path, clock: float) -> None:
    watched = Watched(Rank(ProgressPage.private(), {}), 0.0, 0.0, (0.0, 0.0))
    os.utime(tmp_path, (time.time() + clock, time.time() + clock))
    assert [watched.since_touched(str(tmp_path), now) for now in (5.0, 9.0)] == [0.0, 4.0]
