"""The records of a launcher have the goodput of the job, which outlives the launchers in the cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.log_format import is_record, parse_record, parse_telemetry
from flk_runtime.contract.record import ArchivedRecord, Attempt, Goodput, JobRecord, Standstill
from flk_runtime.contract.status import RankStatus
from flk_runtime.contract.telemetry import unpack_telemetry
from flk_runtime.launcher.records import archive as record_archive
from flk_runtime.launcher.records import writer as record_writer
from flk_runtime.launcher.records.writer import RecordWriter
from flk_runtime.launcher.settings import Limits, Settings
from flk_runtime.shared.progress import ProgressPage

RUNNING = [Attempt(0, 1e9)]


class Archive:
    """The entry of the job in the cluster."""

    def __init__(self, *_: Any) -> None:
        self.created = 1e9
        self.kept: Goodput | None = None
        self.entry: ArchivedRecord | None = None
        self.telemetry: Callable[[], str] = str  # that the newest writer has given

    def read(self) -> ArchivedRecord | None:
        return self.entry

    def put_record(self, record: JobRecord) -> None:
        self.kept = record.goodput

    def put_progress(self, page: ProgressPage, record: JobRecord) -> None:
        self.kept = record.goodput

    def flush(self, seconds: float) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still; ``now`` is its time."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = clock.time = lambda: clock.now
    monkeypatch.setattr(record_writer, "time", clock)
    return clock


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Archive:
    made = Archive()

    def make(*_: Any, telemetry: Callable[[], str] = str, **__: Any) -> Archive:
        made.telemetry = telemetry
        return made

    monkeypatch.setattr(record_archive, "RecordArchive", make)
    return made


def writer(lines: list[str], tmp_path: Path, **settings: Any) -> RecordWriter:
    settings = {"command": ("train.py",), "records": "records", "termination_log": str(tmp_path / "end"), **settings}
    return RecordWriter(Settings(**settings), lambda line: lines.append(line.decode()), lambda number: [])


def logged(lines: list[str]) -> list[Goodput | None]:
    return [record.goodput for line in lines if (record := parse_record(line.rstrip()))]


def test_goodput_goes_to_the_log_the_cluster_and_the_termination_message(
    archive: Archive, clock: SimpleNamespace, tmp_path: Path
) -> None:
    lines: list[str] = []
    records = writer(lines, tmp_path)
    clock.now += 100
    records.write_running(RUNNING)
    records.keep_progress([RankStatus(0, 0)])
    assert logged(lines) == [Goodput(1100, {"waiting": 100})]
    clock.now += 99  # the log is new enough
    records.keep_progress([RankStatus(0, 0)])
    assert len(logged(lines)) == 1
    assert archive.kept == Goodput(1199, {"waiting": 199})
    clock.now += 300
    records.keep_progress([RankStatus(0, 0)])
    assert logged(lines)[1:] == [Goodput(1499, {"waiting": 499})]
    clock.now += 1
    records.finish_stopped(15, None, RUNNING)
    end = JobRecord.from_json((tmp_path / "end").read_text())
    assert end
    assert end.goodput == archive.kept == Goodput(1500, {"waiting": 500})


def test_a_standstill_is_no_computing_while_it_lasts(archive: Archive, clock: SimpleNamespace, tmp_path: Path) -> None:
    lines: list[str] = []
    records = writer(lines, tmp_path)
    assert records.ledger
    page = ProgressPage.private()
    records.ledger.start_attempt(page, 1000.0)
    page.step, page.first_step, page.first_step_time, page.step_time = 9, 1, 1010.0, 1040.0
    clock.now = 1100.0
    records.write_running(RUNNING)
    records.write_waits([], Standstill(1040.0, "rank 1 sleeps", "gpt-worker-1"))
    told = logged(lines)[-1]
    assert told
    assert told.seconds == {"starting": 10.0, "computing": 30.0, "hanging": 60.0}
    clock.now = 1200.0
    records.keep_progress([RankStatus(0, 0)])
    assert archive.kept
    assert archive.kept.seconds == {"starting": 10.0, "computing": 30.0, "hanging": 160.0}
    records.write_waits([], None)  # a rank makes progress again
    assert archive.kept.seconds["computing"] == 190.0


@pytest.mark.parametrize(
    ("page", "saved", "stored"),
    [
        ({}, None, None),
        ({"saved": 40, "stored": 20}, 40, 20),
        ({"restored": 0}, None, None),
        ({"restored": 30}, 30, None),
        ({"restored": 30, "saved": 40}, 40, None),
    ],
)
def test_the_record_says_which_checkpoints_there_are(
    archive: Archive, clock: SimpleNamespace, tmp_path: Path, page: dict[str, int], saved: int, stored: int
) -> None:
    lines: list[str] = []
    records = writer(lines, tmp_path)
    records.write_running(RUNNING)
    clock.now += 400
    records.keep_progress([RankStatus(0, 0, **page)])
    told = [record for line in lines if (record := parse_record(line.rstrip()))][-1]
    assert (told.saved, told.stored) == (saved, stored)
    assert ("saved" in lines[-1]) == (saved is not None)
    records.finish_stopped(15, None, RUNNING)
    end = JobRecord.from_json((tmp_path / "end").read_text())
    assert end
    assert (end.saved, end.stored) == (saved, stored)


@pytest.mark.promise("Recovery: The causes of a job's time add up")
@pytest.mark.usefixtures("clock")
def test_the_next_launcher_adds_the_time_until_it_began(archive: Archive, tmp_path: Path) -> None:
    """The job was suspended: its record says preempted, and the attempts of former launchers are no failures."""
    former = Goodput(950, {"computing": 80.0, "starting": 20.0}, 1, 41)
    record = JobRecord("preempted", 143, attempts=RUNNING, goodput=former)
    archive.entry = ArchivedRecord("gpt", "uid-1", 1, 1, 1e9, 1e9 + 100, record)
    records = writer([], tmp_path)
    assert records.former() == ([], True)
    records.write_running(RUNNING)
    assert archive.kept == Goodput(1000, {"computing": 80, "starting": 20, "down": 50}, 1, 41)


def test_the_measurements_go_to_the_cluster_and_the_next_launcher_goes_on_with_them(
    archive: Archive, tmp_path: Path
) -> None:
    first = writer([], tmp_path).telemetry
    assert first
    first.start_attempt(0, [0])
    first.add_line(b'{"step": 5, "loss": 2.5}')
    record = JobRecord("preempted", 143, attempts=RUNNING)
    archive.entry = ArchivedRecord("gpt", "uid-1", 1, 1, 1e9, 1e9 + 100, record, telemetry=archive.telemetry())
    second = writer([], tmp_path)
    second.former()
    assert second.telemetry
    assert [(each.step, each.loss) for each in second.telemetry.read().history] == [(5, 2.5)]


@pytest.mark.parametrize("end", ["succeeded", "stopped", "followed"])
def test_the_last_lines_of_the_log_tell_the_measurements(archive: Archive, tmp_path: Path, end: str) -> None:
    """A job without records in the cluster has a report after its end all the same."""
    lines: list[str] = []
    records = writer(lines, tmp_path, records="")
    assert records.telemetry
    records.telemetry.start_attempt(0, [0])
    if end == "succeeded":
        records.telemetry.add_line(b'{"step": 5, "loss": 2.5}')
        records.finish(JobRecord("succeeded", 0, attempts=RUNNING), leader=True)
    elif end == "stopped":
        records.telemetry.add_line(b'{"step": 5, "loss": 2.5}')
        records.finish_stopped(15, None, RUNNING)
    else:
        records.finish(JobRecord("succeeded", 0, attempts=RUNNING), leader=False)
    told = [unpack_telemetry(text) for line in lines if (text := parse_telemetry(line.rstrip()))]
    assert [[(each.step, each.loss) for each in found.history] for found in told if found] == (
        [[(5, 2.5)]] if end != "followed" else []
    )
    assert all(is_record(line.rstrip()) for line in lines if "flk-telemetry" in line)


@pytest.mark.parametrize("settings", [{"pod": 1, "pods": 2}, {"command": ("-m", "flk_plan.bench", "{}", "train.py")}])
def test_other_launchers_keep_no_goodput(archive: Archive, tmp_path: Path, settings: dict[str, Any]) -> None:
    lines: list[str] = []
    records = writer(lines, tmp_path, **settings)
    records.write_running(RUNNING)
    records.keep_progress([RankStatus(0, 0)])
    assert logged(lines) == [None]


@pytest.mark.parametrize("pods", [1, 2])
@pytest.mark.parametrize(("disruptions", "code"), [(1, 128 + signal.SIGKILL), (0, ExitCode.INFRASTRUCTURE)])
def test_a_pod_that_has_lost_its_ranks_is_started_again_also_if_it_is_the_only_one(
    pods: int, disruptions: int, code: int
) -> None:
    settings = Settings(("train.py",), pods=pods, limits=Limits(disruptions=disruptions))
    lines: list[bytes] = []
    writer = RecordWriter(settings, lines.append, lambda number: [])
    failure = Failure(Kind.LOST, 0, pod_name="gpt-worker-0", message="lost its ranks: the fork server was killed")
    assert writer.finish_without_ranks(failure, [Attempt(0, 1.0)]) == code
    assert lines == [b"[pod 0] failed: gpt-worker-0 lost its ranks: the fork server was killed\n"]
