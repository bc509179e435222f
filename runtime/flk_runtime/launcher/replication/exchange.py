"""Exchange of shards with the launchers of other pods.

`Exchange` receives copies and gives shards, `Fetcher` fetches shards that ranks restore, and `Partner` sends copies to
the launcher that holds those of this pod in one attempt.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, get_args

from flk_runtime.errors import CheckpointError, StorageError
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.replication.store import AttemptEndedError, NoRoomError, ShardStore, Slot, check_shard
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.shard_file import DATA_BEGIN, ShardError, ShardPreamble, check_data, read_preamble, verify
from flk_runtime.system.checksum import crc32
from flk_runtime.wire import Acceptor, Backoff, Done, Failed, Registry, Stream, VersionError, reason

_CONNECT_TIMEOUT: Final = 3.0  # seconds


@dataclass(frozen=True)
class Put:
    """Hold the copy of a shard that follows. The answer is `Done`."""

    shard: ShardId
    keep: CheckpointId | None  # the latest checkpoint of the attempt that is known to be whole


@dataclass(frozen=True)
class Get:
    """Ask for a shard. The answer is `Content`."""

    shard: ShardId


@dataclass(frozen=True)
class Content:
    """The shard that was asked for follows."""


Request = Put | Get
Answer = Done | Failed | Content
MESSAGES: Final[Registry[Request | Answer]] = Registry([*get_args(Request), *get_args(Answer)])
Peer = Stream[Request | Answer]


class RefusedError(StorageError, ConnectionError):
    """The other launcher refuses a request; a repetition does not help."""


def connect(address: tuple[str, int], settings: Settings) -> Peer:
    """Connect to the launcher at ``address``. Raises OSError, as the methods of the stream do."""
    sock = socket.create_connection(address, timeout=min(_CONNECT_TIMEOUT, settings.lease))
    session = settings.session("replication", serves=False, other="the launcher at this address")
    return Stream(sock, session, MESSAGES, settings.lease)


def expect(peer: Peer, kind: type[Done | Content]) -> int:
    """Receive an answer of this kind, and return the length of the shard behind it. Raises RefusedError for others."""
    answer, length = peer.receive()
    if isinstance(answer, Failed):
        raise RefusedError(answer.reason)
    if not isinstance(answer, kind):
        raise RefusedError(f"answered {type(answer).__name__} instead of {kind.__name__}")
    return length


def receive_shard(
    peer: Peer, store: ShardStore, slot: Slot, shard: ShardId, length: int, arrived: Callable[[], None] = lambda: None
) -> None:
    """Receive a shard of ``length`` bytes into its file, and hold it. ``arrived`` is called now and then meanwhile.

    Raises ShardError if it is no shard, or its data was damaged before it was sent, and AttemptEndedError. The
    connection can be used then.
    """
    beginning = bytearray(min(length, DATA_BEGIN))
    checksum = 0
    try:
        with memoryview(beginning) as begin, memoryview(slot.memory) as view, view[len(beginning) : length] as data:
            for piece in peer.receive_data(begin, data):
                arrived()
                if piece.obj is not beginning:
                    checksum = crc32(piece, checksum)
        preamble = ShardPreamble.from_bytes(bytes(beginning))
        if preamble.end != length:
            raise ShardError(f"it has {length} of its {preamble.end} bytes")
        check_data(preamble, checksum)
        check_shard(preamble, shard)
    except BaseException:
        store.cancel(slot)
        raise
    store.hold(slot, preamble)


_RETRY: Final = (0.2, 2.0)  # seconds between two times that all holders of a shard are asked: first, at most
_SLOT_TIMEOUT: Final = 5.0  # seconds until a file is free that another thread still uses


class Exchange:
    """Accepts connections of other launchers of the job, in a thread for each."""

    def __init__(
        self, settings: Settings, store: ShardStore, listener: socket.socket, log: Callable[[str], None]
    ) -> None:
        self._settings, self._store = settings, store
        self._acceptor = Acceptor(
            listener, lambda: settings.session("replication", serves=True), MESSAGES, log, lease=settings.lease
        )

    def run(self) -> None:
        """Accept connections, until `close`."""
        self._acceptor.serve(self._serve, "memory-peer")

    def close(self) -> None:
        """Accept no more connections."""
        self._acceptor.close()

    def _serve(self, peer: Peer, address: str) -> None:
        with contextlib.suppress(OSError):  # the other side has ended, and says why if it can, or it was silent
            while True:
                message, length = peer.receive()
                match message:
                    case Put(shard, keep):
                        self._take(peer, shard, length, keep)
                    case Get(shard):
                        self._give(peer, shard)
                    case other:
                        raise RefusedError(f"asked for {other!r}")

    def _take(self, peer: Peer, shard: ShardId, length: int, keep: CheckpointId | None) -> None:
        """Receive a copy of a shard. A shard that arrives cut off or damaged is not kept."""
        answer: Done | Failed = Done()
        slot = None
        try:
            if not self._store.path(shard):
                slot = self._store.begin(shard, length, _SLOT_TIMEOUT, keep=keep)
        except (NoRoomError, TimeoutError) as error:
            answer = Failed(f"no room: {error}")
        except AttemptEndedError:
            pass  # the sender will hear of it
        try:
            if slot:
                receive_shard(peer, self._store, slot, shard, length)
            else:
                peer.skip_data(length)
        except ShardError as error:
            answer = Failed(f"the shard arrived damaged: {error}")
        except AttemptEndedError:
            pass
        peer.send(answer)

    def _give(self, peer: Peer, shard: ShardId) -> None:
        with self._store.reading(shard) as memory:
            if memory is None:
                peer.send(Failed("not held"))
                return
            try:
                end = read_preamble(memory).end
            except ShardError as error:
                peer.send(Failed(f"the shard is damaged: {error}"))
                return
            with memoryview(memory) as view, view[:end] as content:
                peer.send(Content(), content)


class Fetcher:
    """Fetches shards of the checkpoint to restore from other pods, each once, even if several ranks ask for it."""

    def __init__(self, settings: Settings, store: ShardStore, addresses: Callable[[int], tuple[str, int]]) -> None:
        """``addresses`` gives the address of a pod's launcher."""
        self._settings, self._store, self._addresses = settings, store, addresses
        self._lock = threading.Lock()  # one shard after the other
        self._checked: set[ShardId] = set()
        self._stopped = threading.Event()
        self.received_at = 0.0
        """When bytes of a shard arrived last, by time.monotonic; 0: never."""

    def fetch(self, shard: ShardId, holders: list[int]) -> None:
        """Have the store hold an undamaged shard. Raises OSError or CheckpointError of the last holder that was asked.

        All holders are asked in turn, again and again for the time of a lease. Raises AttemptEndedError after `stop`:
        that nobody gave the shard until then says nothing about it.
        """
        with self._lock:
            if not self._holds(shard):
                others = [pod for pod in holders if pod != self._settings.pod]
                first = self._settings.pod % max(1, len(others))  # so that not all pods ask the same one
                self._fetch(shard, others[first:] + others[:first])
            self._checked.add(shard)

    def stop(self) -> None:
        """Have `fetch` ask no further holder."""
        self._stopped.set()

    def _holds(self, shard: ShardId) -> bool:
        """Whether the store holds a shard, and the shard is undamaged."""
        with self._store.reading(shard) as memory:
            if memory is None:
                return False
            with contextlib.suppress(ShardError):
                if shard not in self._checked:
                    verify(memory)
                return True
        self._store.forget(shard)
        return False

    def _fetch(self, shard: ShardId, holders: list[int]) -> None:
        deadline = time.monotonic() + self._settings.lease
        error: Exception = ConnectionError("no pod holds it")
        backoff = Backoff(*_RETRY)
        while holders:
            for pod in [*holders]:
                if self._stopped.is_set():
                    raise AttemptEndedError
                try:
                    with contextlib.closing(connect(self._addresses(pod), self._settings)) as connection:
                        self._receive(connection, shard)
                        return
                except (CheckpointError, VersionError) as refused:  # it does not have the shard, or a damaged one
                    error = refused
                    holders.remove(pod)
                except OSError as failed:
                    error = failed
            if time.monotonic() >= deadline:
                break
            self._stopped.wait(backoff.next())
        raise AttemptEndedError() if self._stopped.is_set() else error

    def _receive(self, connection: Peer, shard: ShardId) -> None:
        connection.send(Get(shard))
        length = expect(connection, Content)
        slot = self._store.begin(shard, length, _SLOT_TIMEOUT)
        receive_shard(connection, self._store, slot, shard, length, self._note)

    def _note(self) -> None:
        self.received_at = time.monotonic()


_FIRST_DELAY, _LONGEST_DELAY = 0.2, 1.0  # seconds between two tries to reach the partner, see `Backoff`
_PAUSE: Final = 30.0  # seconds after the partner could not be reached in which it is not tried again


class Partner:
    """Sends shards to the partner. Any thread may call the methods.

    Each call has a connection for itself, which a later call goes on with: ranks may save in each step.
    """

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
        self._used: set[Peer] = set()
        self._idle: list[tuple[Peer, float]] = []  # with the time since which nothing is under way, time.monotonic
        self._stopped = False
        self._unreachable_until = 0.0  # time.monotonic
        self._complained = False

    def send(self, shard: ShardId, keep: CheckpointId | None = None) -> bool:
        """Send a copy of a shard that the store holds. Returns whether the partner has the copy now.

        Tries again for the time of a lease, and then says why not, once. ``keep`` is the latest checkpoint of this
        attempt that is known to be whole.
        """
        if not self._partner or time.monotonic() < self._unreachable_until:
            return False
        # A save waits for this, so one that was not reached for a lease gets one try each time.
        deadline = time.monotonic() + (0.0 if self._complained else self._settings.lease)
        backoff = Backoff(_FIRST_DELAY, _LONGEST_DELAY)
        while not self._stopped:
            try:
                sent = self._send(self._partner[1], shard, keep)
                self._complained = False
                return sent
            except (OSError, ShardError) as error:
                if self._stopped:
                    return False
                if isinstance(error, RefusedError | VersionError) or time.monotonic() >= deadline:
                    self._give_up(reason(error), self._partner)
                    return False
                time.sleep(backoff.next())
        return False

    def stop(self) -> None:
        """Have every call return, now and later."""
        with self._lock:
            self._stopped = True
            for connection in self._used:
                connection.interrupt()  # else the next attempt waits for the files into which the partner receives
            while self._idle:
                self._idle.pop()[0].close()

    def _connect(self, address: tuple[str, int]) -> Peer:
        """A connection that was used a moment ago, so that the partner still keeps it, or else a new one."""
        with self._lock:
            while self._idle:
                connection, since = self._idle.pop()
                if time.monotonic() - since < self._settings.lease / 2:
                    return connection
                connection.close()
        return connect(address, self._settings)

    def _send(self, address: tuple[str, int], shard: ShardId, keep: CheckpointId | None) -> bool:
        connection = self._connect(address)
        with self._lock:
            self._used.add(connection)
            if self._stopped:
                connection.interrupt()
        sent = False
        try:
            with self._store.reading(shard) as memory:
                if memory is None:  # its attempt has ended
                    return False
                with memoryview(memory) as view, view[: read_preamble(memory).end] as content:
                    connection.send(Put(shard, keep), content)
                expect(connection, Done)
                sent = True
        finally:
            with self._lock:
                self._used.discard(connection)
                if sent and not self._stopped:
                    self._idle.append((connection, time.monotonic()))
                else:
                    connection.close()
        return sent

    def _give_up(self, why: str, partner: tuple[int, tuple[str, int]]) -> None:
        self._unreachable_until = time.monotonic() + _PAUSE
        if not self._complained:
            pod, (host, port) = partner
            self._log(
                f"pod {pod} at {host}:{port} holds no copies of this pod's checkpoints: {why}; if this pod is lost, "
                "the job falls back to a checkpoint on its volume, or starts again"
            )
        self._complained = True
