"""ReadPool: threads that read from the cluster, for which nobody waits at Ctrl-C."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

THREADS: Final = 8  # requests at a time
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class ReadPool(Executor):
    """Threads that call functions, like a ThreadPoolExecutor's.

    Its end cancels what no thread has begun, and waits for nothing. The interpreter does not wait for these threads
    either, so what they call must leave nothing half done.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._threads, self._started, self._ended = threads, 0, False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(
        self, act: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Have a thread call the function; the future has its result. Raises RuntimeError after the end."""
        if self._ended:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[_Result] = Future()
        self._calls.put((future, partial(act, *args, **kwargs)))
        if self._started < self._threads:
            self._started += 1
            threading.Thread(target=self._run, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads. Calls that no thread has begun are cancelled, whatever the arguments are."""
        self._ended = True
        with contextlib.suppress(Empty):
            while call := self._calls.get_nowait():
                call[0].cancel()
        for _ in range(self._started):
            self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            future, act = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except BaseException as error:  # of any kind: whoever asks for the result raises it
                future.set_exception(error)
