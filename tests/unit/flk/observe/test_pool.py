"""A ReadPool ends at once, whatever its threads do."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from flk.observe.pool import ReadPool


def test_calls_have_results_and_errors() -> None:
    with ReadPool(2) as pool:
        assert list(pool.map(str, range(9))) == list("012345678")
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result()


def test_after_the_end_no_call_is_taken() -> None:
    with ReadPool(1) as pool:
        pass
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(str)


def test_the_end_cancels_what_has_not_begun_and_waits_for_nothing() -> None:
    began, ended = threading.Event(), threading.Event()

    def read() -> bool:
        began.set()
        assert threading.current_thread().daemon  # the interpreter waits for the others at its end
        return ended.wait()

    with ReadPool(1) as pool:
        running, waiting = pool.submit(read), pool.submit(read)
        began.wait()
    assert not running.done()
    with pytest.raises(CancelledError):
        waiting.result()
    ended.set()
    assert running.result()
