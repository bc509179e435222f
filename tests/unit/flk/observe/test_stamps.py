"""Time stamps of the kubelet are taken off the lines of a log."""

from __future__ import annotations

from flk.jobs.logs import LogPosition
from flk.observe.progress import split_stamp


def test_time_stamps_are_taken_off() -> None:
    text = "hello 2026-01-01T00:00:00Z "
    assert split_stamp(f"2026-01-01T00:00:01.123Z {text}".encode()) == ("2026-01-01T00:00:01.123Z", text)


def test_words_of_the_kubelet_have_none() -> None:
    assert split_stamp(b"unable to retrieve container logs") == ("", "unable to retrieve container logs")
    assert LogPosition().accept(b"unable to retrieve container logs")
