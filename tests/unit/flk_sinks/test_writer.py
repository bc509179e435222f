"""The thread that writes rows: it never stops the training, whatever a sink does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from flk_sinks.sink import Row
from flk_sinks.writer import Writer, close

SECONDS = 30.0  # for what takes milliseconds


class Recorded:
    """A sink that keeps what it gets, fails as often as ``failures`` says, and waits where ``gate`` is not set."""

    title = "Test"

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls: list[str] = []
        self.rows: list[Row] = []
        self.gate = threading.Event()
        self.gate.set()
        self.began, self.wrote = threading.Event(), threading.Event()

    def open(self) -> None:
        self.calls.append("open")

    def describe(self) -> None:
        self.calls.append("describe")

    def write(self, rows: Sequence[Row]) -> None:
        self.began.set()
        assert self.gate.wait(SECONDS)
        if self.failures:
            self.failures -= 1
            raise OSError("no space\nleft on device")
        self.rows += rows
        self.wrote.set()

    def close(self, ended: str) -> None:
        self.calls.append(ended)


def row(step: int) -> Row:
    return Row(step, 0.0, {"loss": 1.0})


def writer(sink: Recorded, lines: list[str], limit: int = 100) -> Writer:
    return Writer(sink, lines.append, limit=limit, first_delay=0.001)


@pytest.mark.parametrize("failures", [0, 1_000_000])
def test_rows_are_written_at_the_end_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't create new thread")))
    sink, lines = Recorded(failures), list[str]()
    one = writer(sink, lines)
    for step in range(3):
        one.put(row(step))
    close([one], "finished", SECONDS if not failures else 0.01)
    if failures:
        assert lines[-1] == "Test: not all is written after 0.01 s; 3 lines of metrics may be missing, steps 0-2"
    else:
        assert (sink.calls, [each.step for each in sink.rows]) == (["open", "describe", "finished"], [0, 1, 2])
        assert lines == []


def test_rows_are_written_in_order_and_the_run_is_ended_once() -> None:
    sink, lines = Recorded(), list[str]()
    one = writer(sink, lines)
    for step in range(50):
        one.put(row(step))
    close([one], "finished", SECONDS)
    close([one], "failed", SECONDS)
    assert sink.rows == [row(step) for step in range(50)]
    assert sink.calls == ["open", "describe", "finished"]
    assert lines == []


def test_a_sink_that_fails_is_one_line_and_is_opened_again() -> None:
    sink, lines = Recorded(failures=3), list[str]()
    one = writer(sink, lines)
    one.put(row(1))
    assert sink.wrote.wait(SECONDS)
    close([one], "finished", SECONDS)
    assert sink.rows == [row(1)]
    assert sink.calls == ["open", "describe"] * 4 + ["finished"]
    assert lines == [
        "Test: OSError: no space; flk tries again, and training goes on",
        "Test works again",
    ]


def test_a_sink_that_is_too_slow_loses_the_newest_rows_and_says_so_once() -> None:
    sink, lines = Recorded(), list[str]()
    one = writer(sink, lines, limit=3)
    sink.gate.clear()
    one.put(row(0))
    assert sink.began.wait(SECONDS)
    for step in range(1, 6):
        one.put(row(step))
    sink.gate.set()
    close([one], "finished", SECONDS)
    assert sink.rows == [row(0), row(1), row(2)]
    assert lines == [
        "Test is too slow or away: 3 lines wait, and new ones are dropped",
        "Test: 3 lines of metrics were dropped",
    ]


def test_the_end_of_a_run_waits_for_a_sink_no_longer_than_it_may() -> None:
    sink, lines = Recorded(), list[str]()
    one = writer(sink, lines)
    sink.gate.clear()
    one.put(row(0))
    assert sink.began.wait(SECONDS)
    close([one], "stopped", 0.01)
    assert lines == ["Test: not all is written after 0.01 s; 1 line of metrics may be missing, step 0"]
    sink.gate.set()


def test_all_sinks_end_at_once() -> None:
    """One after another, they might take longer than a rank has before it is killed."""
    slow, fast, lines = Recorded(), Recorded(), list[str]()
    writers = [writer(slow, lines), writer(fast, lines)]
    slow.gate.clear()
    fast.close = lambda ended: slow.gate.set()  # type: ignore[method-assign]
    for each in writers:
        each.put(row(7))
    close(writers, "stopped", SECONDS)
    assert (slow.rows, lines) == ([row(7)], [])


def test_hyperparameters_that_come_later_are_written_too() -> None:
    sink = Recorded()
    one = writer(sink, [])
    one.put(row(0))
    assert sink.wrote.wait(SECONDS)
    one.describe()
    close([one], "finished", SECONDS)
    assert sink.calls == ["open", "describe", "describe", "finished"]
