"""The coordinator of a job, in the launcher of pod 0: which attempt runs, with which pods, why it ended, what follows.

`leader` decides and sends messages (`launcher.transport`). It has no sockets, threads or clock of its own. It asks:

- `membership`: which pods train in the next attempt
- `memory`: from which checkpoint in memory an attempt starts, and which shards a launcher transfers before it ends
- `policy`: what was the root cause of an attempt's end, and whether another attempt follows
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from flk_runtime.launcher.coordinator.leader import Leader
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport import Server
from flk_runtime.launcher.transport.messages import Event, Message

if TYPE_CHECKING:
    from flk_runtime.launcher.telemetry.keeper import Keeper

__all__ = ["Leader", "serve"]


def serve(
    settings: Settings,
    post: Callable[[Event], None],
    log: Callable[[str], None],
    telemetry: Keeper | None = None,
) -> Server:
    """A server of the rendezvous whose members a new `Leader` leads. Arguments as for `Server` and `Leader`."""

    def lead(send: Callable[[Collection[int], Message], None], serve_attempt_store: Callable[[], int]) -> Leader:
        return Leader(settings, send, serve_attempt_store, log, time.monotonic(), telemetry)

    return Server(settings, lead, post, log)
