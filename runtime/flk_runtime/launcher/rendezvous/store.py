"""torch's TCPStore as the rendezvous uses it, and the threads that wait for its keys."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flk_runtime.launcher.rendezvous.messages import Event, ThreadFailed

_TIMEOUT = timedelta(seconds=30)  # of connecting, and of single operations
_WAIT_INTERVAL = 3600.0  # seconds of one wait; torch's store knows no wait without a timeout


def connect(host: str, port: int) -> Any:
    """Open a client of the store at this address. Raises RuntimeError if it does not answer."""
    return _open(host, port, serve=False)


def serve(port: int) -> Any:
    """Serve a new, empty store on all addresses of this pod; port 0 takes any free one.

    Raises RuntimeError if the port is taken.
    """
    return _open("0.0.0.0", port, serve=True)  # noqa: S104 - the pod's service leads to this port


def wait_for(store: Any, key: str, interval: float = _WAIT_INTERVAL) -> bytes:
    """Wait until ``key`` is set, however long that takes, and return its value.

    One wait of the store takes ``interval`` seconds. Raises RuntimeError if the connection breaks.
    """
    while not wait_at_most(store, key, interval):
        pass
    value: bytes = store.get(key)
    return value


def wait_at_most(store: Any, key: str, seconds: float) -> bool:
    """Wait until ``key`` is set, and return whether it is. Raises RuntimeError if the connection breaks."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:  # the time is over, or the connection broke, which the next line tells apart
        return bool(store.check([key]))
    return True


def start_thread(name: str, function: Callable[[], None], post: Callable[[Event], None]) -> None:
    """Run ``function`` in a daemon thread, and post ThreadFailed if it raises."""

    def run() -> None:
        try:
            function()
        except BaseException as error:
            post(ThreadFailed(error))

    threading.Thread(target=run, name=name, daemon=True).start()


def _open(host: str, port: int, *, serve: bool) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=serve, timeout=_TIMEOUT, wait_for_workers=False)  # type: ignore[attr-defined]
