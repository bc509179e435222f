"""Threads of the rendezvous, whose exceptions reach the launcher's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flk_runtime.launcher.transport.messages import Event, ThreadFailed


def start_thread(name: str, function: Callable[[], None], post: Callable[[Event], None]) -> None:
    """Run ``function`` in a daemon thread, and post ThreadFailed if it raises."""

    def run() -> None:
        try:
            function()
        except BaseException as error:
            post(ThreadFailed(error))

    threading.Thread(target=run, name=name, daemon=True).start()
