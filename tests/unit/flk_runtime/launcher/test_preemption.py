"""How all ranks agree on the step after which they save and end, in all orders of what launchers and ranks do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.launcher.preemption import NO_STEP, Boundary, PodPreemption, Preemption, agreed_step
from flk_runtime.shared import progress
from flk_runtime.shared.progress import ProgressPage

CAUSE = Failure(Kind.PREEMPTED, 1, message="received SIGTERM")


def waiting(step: int) -> Boundary:
    return Boundary(step, True)


def running(step: int) -> Boundary:
    return Boundary(step, False)


@pytest.mark.parametrize(
    ("ranks", "step"),
    [
        ([waiting(7), waiting(7)], 7),
        ([waiting(7), running(7)], 8),  # the second passed the boundary before it could see `hold`
        ([running(6), waiting(7)], 7),
        ([running(7), running(7)], 8),
        ([running(0)], 1),
        ([waiting(0), waiting(0)], 0),
        ([waiting(7), running(-1)], NO_STEP),  # has no step boundary
        ([], NO_STEP),
    ],
)
def test_all_ranks_stop_after_the_furthest_step_that_one_reaches(ranks: list[Boundary], step: int) -> None:
    assert agreed_step(ranks) == step


class Rank:
    """A rank in lockstep with its peers: it ends step n + 1 only after all of them have begun it."""

    def __init__(self, steps: int) -> None:
        self.page = ProgressPage.private()
        self.steps = steps
        self.begun = steps + 1
        self.page.boundary = steps
        self.stopped_at: int | None = None

    def advance(self, peers: list[Rank]) -> bool:
        """Do what comes next. Returns whether that changed something."""
        if self.stopped_at is not None:
            return False
        if self.steps < self.begun:
            if any(peer.begun < self.begun for peer in peers):
                return False  # waits in a collective
            self.steps += 1
            return True
        stop = self.page.reach_boundary(self.steps)
        if stop is None:
            return False
        if stop:
            self.page.saved = self.stopped_at = self.steps
        else:
            self.begun += 1
        return True


class Launcher:
    def __init__(self, pod: int, ranks: list[Rank]) -> None:
        self.pod = pod
        self.ranks = ranks
        self.inbox: list[str | int] = []
        self.outbox: list[list[Boundary]] = []
        self.preemption: PodPreemption | None = None

    def advance(self) -> bool:
        if self.inbox:
            message = self.inbox.pop(0)
            if message == "started":
                self.preemption = PodPreemption([rank.page for rank in self.ranks], now=0.0)
            elif self.preemption and isinstance(message, int):
                self.preemption.stop_at(message)
            return True
        boundaries = self.preemption.boundaries(now=1.0) if self.preemption else None
        if boundaries is not None:
            self.outbox.append(boundaries)
        return boundaries is not None


@settings(max_examples=50)
@given(st.data())
def test_all_ranks_save_after_the_same_step_in_every_order_of_events(data: st.DataObject) -> None:
    pods, processes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    ranks = [Rank(5) for _ in range(pods * processes)]
    launchers = [Launcher(pod, ranks[pod * processes : (pod + 1) * processes]) for pod in range(pods)]
    leader = Preemption(range(pods), CAUSE)
    begin = data.draw(st.integers(0, 20))
    for turn in range(400):
        if turn == begin:
            for launcher in launchers:
                launcher.inbox.append("started")
        actor = data.draw(st.integers(0, len(ranks) + pods)) if turn < 60 else turn % (len(ranks) + pods + 1)
        if actor < len(ranks):
            ranks[actor].advance(ranks)
        elif actor < len(ranks) + pods:
            launchers[actor - len(ranks)].advance()
        else:
            for launcher in launchers:
                while launcher.outbox:
                    target = leader.add_boundaries(launcher.pod, launcher.outbox.pop())
                    if target is not None:
                        for each in launchers:
                            each.inbox.append(target)
    assert {rank.stopped_at for rank in ranks} == {leader.target}
    for launcher in launchers:
        assert launcher.preemption is not None
        for saved in (launcher.preemption.saved, None):  # the second is said after the end
            leader.add_end(launcher.pod, saved)
    assert leader.over
    assert leader.failure.message == f"received SIGTERM; saved after step {leader.target}"


def test_a_rank_goes_on_if_the_launcher_lets_it() -> None:
    page = ProgressPage.private()
    page.boundary = 3
    preemption = PodPreemption([page], now=0.0)
    assert page.reach_boundary(4) is None
    assert page.waiting
    preemption.release()
    assert page.reach_boundary(4) is False
    assert not page.waiting
    assert not page.hold
    assert preemption.boundaries(100.0) is None


def test_the_boundaries_are_read_once_and_not_before_all_ranks_can_see_hold() -> None:
    page = ProgressPage.private()
    page.boundary = 3
    preemption = PodPreemption([page], now=10.0)
    assert preemption.boundaries(10.0) is None
    assert preemption.settled_at is not None
    assert preemption.boundaries(preemption.settled_at) == [running(3)]
    assert preemption.boundaries(100.0) is None


def test_a_pod_has_saved_when_all_of_its_ranks_have() -> None:
    pages = [ProgressPage.private(), ProgressPage.private()]
    preemption = PodPreemption(pages, now=0.0)
    preemption.stop_at(7)
    pages[0].saved = 7
    assert preemption.saved is None


def test_a_rank_that_waits_for_the_step_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ProgressPage.private()
    PodPreemption([page], now=0.0)

    def sleep(seconds: float) -> None:
        assert page.heartbeat_time > 0
        page.target = 4

    monkeypatch.setattr(progress.time, "sleep", sleep)
    assert page.must_stop(4)


def test_one_rank_without_step_boundaries_decides_at_once_that_all_get_the_signal() -> None:
    leader = Preemption([0, 1, 2], CAUSE)
    assert leader.add_boundaries(0, [waiting(0)]) is None
    assert leader.add_boundaries(1, [running(-1)]) == NO_STEP
    assert leader.add_boundaries(2, [waiting(7)]) is None  # too late
    for pod in range(3):
        leader.add_end(pod, None)
    assert leader.over
    assert leader.failure == CAUSE


def test_a_pod_that_ends_before_it_reports_decides_that_all_get_the_signal() -> None:
    leader = Preemption([0, 1], CAUSE)
    assert leader.add_boundaries(0, [waiting(0)]) is None
    assert leader.add_end(1, None) == NO_STEP
    assert leader.lose(0)


def test_a_save_that_one_pod_did_not_finish_is_not_called_saved() -> None:
    leader = Preemption([0, 1], CAUSE)
    assert leader.add_boundaries(0, [waiting(7)]) is None
    assert leader.add_boundaries(1, [waiting(7)]) == 7
    leader.add_end(0, 7)
    assert not leader.over
    leader.add_end(1, None)
    assert leader.over
    assert leader.failure.message == "received SIGTERM; not all ranks saved after step 7 within the grace period"
    assert leader.add_end(1, 7) is None  # said twice
