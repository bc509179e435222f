"""Threads of the launcher."""

from __future__ import annotations

import queue

from flk_runtime.launcher.control import ThreadFailed, start_thread


def test_the_loop_hears_of_the_exception_with_which_a_thread_ends() -> None:
    error = ValueError("a bug")

    def fail() -> None:
        raise error

    events: queue.SimpleQueue[ThreadFailed] = queue.SimpleQueue()
    start_thread("failing", fail, events.put)
    assert events.get(timeout=10).error is error
