"""The ledger of a job's time: the causes add up to the time since the start, and lost steps are no goodput."""

from __future__ import annotations

import random

import pytest

from flk_runtime.contract.record import SOURCES, TIME_CAUSES, Goodput
from flk_runtime.launcher.records.ledger import Ledger
from flk_runtime.shared import progress
from flk_runtime.shared.progress import Phase, ProgressPage

EPOCH = 1e9  # seconds since the epoch at the start


class Clock:
    """A clock that stands still, for pages and ledgers."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    return clock


class Job:
    """A job whose rank does steps of one second."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ledger = Ledger(clock.now, EPOCH)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def attempt(
        self, *, restored: int = 0, starting: float = 5.0, restoring: float = 0.0, source: str = "start"
    ) -> None:
        """Start an attempt, whose first step ends after ``starting`` and ``restoring`` seconds."""
        self.page = ProgressPage.private()
        self.ledger.start_attempt(self.page, self.clock.now)
        self.wait(starting)
        with self.page.during(Phase.RESTORING):
            self.wait(restoring)
        self.page.phase = Phase.TRAINING
        self.page.restored, self.page.restored_from = restored, SOURCES.index(source)
        self.page.record_step(restored + 1)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.wait(1.0)
            self.page.record_step(self.page.step + 1)

    def save(self, seconds: float) -> None:
        with self.page.during(Phase.SAVING):
            self.wait(seconds)

    def fail(self, *, hung: bool = False) -> None:
        self.ledger.end_attempt(self.clock.now, failed=True, hung=hung)

    @property
    def goodput(self) -> Goodput:
        return self.ledger.read(self.clock.now)


def test_each_second_has_one_cause(clock: Clock) -> None:
    job = Job(clock)
    job.wait(3)  # for the other pods
    job.attempt()
    job.steps(9)  # 1 to 10
    job.save(2)
    job.steps(6)
    assert job.goodput.seconds == {"waiting": 3, "starting": 5, "saving": 2, "computing": 15}
    job.wait(0.5)  # of step 17
    job.fail()
    job.wait(4)
    job.attempt(restored=10, starting=1, restoring=2.5)
    job.steps(9)
    found = job.goodput
    assert found.seconds == {
        "waiting": 3,
        "starting": 6,
        "saving": 2,
        "lost": 6.5,
        "recovering": 4,
        "restoring": 2.5,
        "computing": 9 + 9,
    }
    assert found.total == pytest.approx(clock.now - 100) == found.until - EPOCH
    assert found.share == pytest.approx(18 / found.total)
    assert (found.first_step, found.step) == (1, 20)
    job.ledger.close(clock.now, failed=False)
    job.wait(100)
    assert job.goodput == found


def test_a_beginning_that_the_script_corrects_loses_no_steps(clock: Clock) -> None:
    """flk finds no checkpoint, and the script restores one of its own."""
    job = Job(clock)
    job.attempt()
    job.steps(9)  # 2 to 10
    job.fail()
    page = ProgressPage.private()
    job.ledger.start_attempt(page, clock.now)
    page.restored = 0
    assert job.goodput.seconds["lost"] == 9
    page.restored = 8
    assert job.goodput.seconds["lost"] == 2
    job.fail()
    assert job.goodput.seconds["lost"] == 2
    assert job.goodput.seconds["computing"] == 7


def test_a_hang_is_the_time_since_the_last_step(clock: Clock) -> None:
    job = Job(clock)
    job.attempt()
    job.steps(10)
    job.wait(480)
    job.fail(hung=True)
    assert job.goodput.seconds == {"starting": 5, "computing": 10, "hanging": 480}


def test_steps_of_several_attempts_can_be_lost(clock: Clock) -> None:
    """The newest checkpoint may be older than the attempt before: its copies could not be read."""
    job = Job(clock)
    job.attempt()
    job.steps(99)
    job.fail()
    job.attempt(restored=100)
    job.steps(49)
    job.fail()
    job.attempt(restored=80)
    assert job.goodput.seconds == {"starting": 15, "computing": 79, "lost": 20 + 49}
    job.steps(1)
    job.fail()
    job.attempt(restored=0)
    assert job.goodput.seconds == {"starting": 20, "lost": 99 + 49 + 1}


@pytest.mark.parametrize(("stored", "lost"), [(-1, 19.0), (10, 10.0), (20, 0.0)])
def test_a_job_that_failed_has_lost_the_steps_after_its_newest_checkpoint_in_storage(
    clock: Clock, stored: int, lost: float
) -> None:
    """Those in memory end with its pods."""
    job = Job(clock)
    job.attempt()
    job.page.stored = stored
    job.page.saved = 20
    job.steps(19)
    job.wait(0.5)
    job.fail()
    job.ledger.close(clock.now, failed=True)
    found = job.goodput
    assert {cause: found.seconds.get(cause, 0.0) for cause in TIME_CAUSES if found.seconds.get(cause)} == {
        cause: seconds
        for cause, seconds in {"computing": 19 - lost, "starting": 5, "lost": lost + 0.5}.items()
        if seconds
    }
    assert found.share == pytest.approx((19 - lost) / 24.5)


def test_a_checkpoint_that_was_restored_from_storage_stays_there(clock: Clock) -> None:
    for source, kept in (("storage", 9.0), ("memory", 0.0)):
        job = Job(clock)
        job.attempt()
        job.steps(9)
        job.fail()
        job.attempt(restored=10, source=source)
        job.steps(5)
        job.fail()
        job.ledger.close(clock.now, failed=True)
        assert job.goodput.seconds.get("computing", 0.0) == kept


def test_a_later_launcher_goes_on_with_the_record(clock: Clock) -> None:
    """The job was suspended for 1,000 s after step 101, and the step that it restores is an older one."""
    job = Job(clock)
    job.attempt()
    job.steps(100)
    former = job.goodput
    clock.now = 7.0  # another node
    later = Job(clock)
    later.ledger = Ledger(7.0, former.until + 1000)
    later.ledger.resume(former)
    assert later.goodput.seconds == {"starting": 5, "computing": 100, "down": 1000}
    later.attempt(restored=51, starting=3)
    later.steps(10)
    assert later.goodput.seconds == {"starting": 8, "computing": 60, "lost": 50, "down": 1000}
    assert later.goodput.total == later.goodput.until - EPOCH


@pytest.mark.promise("Recovery: The causes of a job's time add up")
@pytest.mark.parametrize("seed", range(40))
def test_the_causes_add_up_to_the_time_since_the_start(clock: Clock, seed: int) -> None:
    """Whatever happens, in whatever order: also with several launchers, and a look at any moment."""
    chance = random.Random(seed)
    job = Job(clock)
    began = clock.now
    for _ in range(chance.randrange(1, 12)):
        job.wait(chance.expovariate(0.1))
        newest = job.goodput.step or 0
        job.attempt(restored=chance.randint(0, newest), starting=chance.random(), restoring=chance.random())
        for _ in range(chance.randrange(6)):
            job.steps(chance.randrange(20))
            job.save(chance.random())
            found = job.goodput
            assert found.total == pytest.approx(clock.now - began, abs=0.01)
            assert found.seconds.keys() <= set(TIME_CAUSES)
            assert min(found.seconds.values()) >= -0.01
        job.wait(chance.random())
        if chance.random() < 0.3:  # the pod is lost, and the job goes on in another one
            former, away = job.goodput, chance.random() * 50
            job.wait(away)
            job.ledger = Ledger(clock.now, former.until + away)
            job.ledger.resume(former)
        else:
            job.fail(hung=chance.random() < 0.3)
        assert job.goodput.total == pytest.approx(clock.now - began, abs=0.02)
        assert job.goodput.total == pytest.approx(job.goodput.until - EPOCH, abs=0.02)


def test_each_field_of_a_page_has_a_place_of_its_own() -> None:
    places = [field._index for field in vars(ProgressPage).values() if hasattr(field, "_index")]
    assert len(places) > 15
    assert len(set(places)) == len(places)
