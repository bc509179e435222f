"""The partner of this pod in one attempt: the launcher of another pod that gets copies of this pod's shards."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from flk_runtime.launcher.replication.messages import Peer, Put, RefusedError, connect, expect
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.replication.store import ShardStore
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.shard_file import ShardError, read_preamble
from flk_runtime.wire import Backoff, Done, VersionError, reason

_FIRST_DELAY, _LONGEST_DELAY = 0.2, 1.0  # seconds between two tries to reach the partner, see `Backoff`
_PAUSE: Final = 30.0  # seconds after the partner could not be reached in which it is not tried again

T = TypeVar("T")


class Partner:
    """Sends shards to the partner. Any thread may call the methods; each call has a connection of its own."""

    def __init__(
        self,
        settings: Settings,
        store: ShardStore,
        partner: tuple[int, tuple[str, int]] | None,
        log: Callable[[str], None],
    ) -> None:
        """``partner`` is the partner's pod and address; None: there is no partner, and nothing is sent."""
        self._settings, self._store, self._partner, self._log = settings, store, partner, log
        self._lock = threading.Lock()
        self._idle: list[Peer] = []
        self._used: set[Peer] = set()
        self._stopped = False
        self._unreachable_until = 0.0  # time.monotonic
        self._complained = False

    def send(self, shard: ShardId, keep: CheckpointId | None = None) -> bool:
        """Send a copy of a shard that the store holds. Returns whether the partner has the copy now.

        ``keep`` is the latest checkpoint of this attempt that is known to be whole.
        """
        return self._exchange(lambda connection: self._send(connection, shard, keep)) or False

    def stop(self) -> None:
        """Have every call return, now and later."""
        with self._lock:
            self._stopped = True
            for connection in self._used:
                connection.interrupt()
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _exchange(self, action: Callable[[Peer], T]) -> T | None:
        """Call ``action`` with a connection to the partner, and return its result; None: the partner is not reached.

        Tries again for the time of a lease, and then says why not, once.
        """
        if not self._partner or time.monotonic() < self._unreachable_until:
            return None
        # A save waits for this, so one that was not reached for a lease gets one try each time.
        deadline = time.monotonic() + (0.0 if self._complained else self._settings.lease)
        backoff = Backoff(_FIRST_DELAY, _LONGEST_DELAY)
        while not self._stopped:
            try:
                result = self._try(action, self._partner[1])
                self._complained = False
                return result
            except (OSError, ShardError) as error:
                if self._stopped:
                    return None
                final = isinstance(error, VersionError)
                if final or isinstance(error, RefusedError) or time.monotonic() >= deadline:
                    self._complain(reason(error), self._partner)
                    self._unreachable_until = math.inf if final else time.monotonic() + _PAUSE
                    return None
                time.sleep(backoff.next())
        return None

    def _try(self, action: Callable[[Peer], T], address: tuple[str, int]) -> T:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = connect(address, self._settings)
        with self._lock:
            self._used.add(connection)
            if self._stopped:
                connection.interrupt()
        works = False
        try:
            result = action(connection)
            works = True
            return result
        finally:
            with self._lock:
                self._used.discard(connection)
                if works and not self._stopped:
                    self._idle.append(connection)
                else:
                    connection.close()

    def _complain(self, why: str, partner: tuple[int, tuple[str, int]]) -> None:
        with self._lock:
            complained, self._complained = self._complained, True
        if not complained:
            pod, (host, port) = partner
            self._log(
                f"pod {pod} at {host}:{port} holds no copies of this pod's checkpoints: {why}; if this pod is lost, "
                "the job falls back to a checkpoint on its volume, or starts again"
            )

    def _send(self, connection: Peer, shard: ShardId, keep: CheckpointId | None) -> bool:
        with self._store.reading(shard) as memory:
            if memory is None:  # its attempt has ended
                return False
            with memoryview(memory) as view, view[: read_preamble(memory).end] as content:
                connection.send(Put(shard, keep), content)
            expect(connection, Done)
            return True
