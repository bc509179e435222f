"""Threads of the launcher, whose exceptions reach its loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ThreadFailed:
    """A thread ended with an exception, which is a bug in flk."""

    error: BaseException


def start_thread(name: str, function: Callable[[], None], post: Callable[[ThreadFailed], None]) -> None:
    """Run ``function`` in a daemon thread, and post ThreadFailed if it raises."""
    threading.Thread(target=posting(function, post), name=name, daemon=True).start()


def posting(function: Callable[..., None], post: Callable[[ThreadFailed], None]) -> Callable[..., None]:
    """The function of a thread, which posts ThreadFailed where ``function`` raises."""

    def run(*arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            post(ThreadFailed(error))

    return run
