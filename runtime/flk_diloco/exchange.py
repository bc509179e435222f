"""HubExchange: connects a worker's rank 0 to the hub, in threads."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from typing import Any

from flk_diloco import messages
from flk_diloco.messages import Data, FromHub, FromWorker, Peer
from flk_diloco.options import Membership
from flk_runtime.errors import RendezvousError, SetupError
from flk_runtime.wire import LEASE, Backoff, Refused, Stream, VersionError

Received = tuple[FromHub, Data]
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds between two attempts to connect, see `Backoff`
_CLOSE_TIMEOUT = 10.0  # seconds in which the last messages are sent


class HubExchange:
    """Sends outer gradients to the hub, and receives averages and parameters in the order of the hub.

    It connects again when the connection breaks, for as long as ``patience``.
    """

    def __init__(
        self,
        membership: Membership,
        layout: dict[str, Any],
        version: int,
        digest: str,
        *,
        patience: float,
        lease: float = LEASE,
    ) -> None:
        """``version`` of the parameters that this worker has, and their ``digest`` before its first round.

        ``patience``: seconds without a hub after which `get` raises RendezvousError.
        """
        self._membership, self._layout, self._digest = membership, layout, digest
        self._patience, self._lease = patience, lease
        self._incarnation = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._version = version  # received
        self._pending: tuple[int, bytes] | None = None  # a contribution without a result, with its version
        self._incoming: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[tuple[FromWorker, Data] | None] = queue.SimpleQueue()
        self._begun = False  # the hub of this connection takes contributions
        self._refused: SetupError | None = None
        self._problem = ""  # why there is no connection
        self._lost_at: float | None = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def missing(self) -> str:
        """What this worker waits for: the others, or a connection to the hub, with the reason why it has none."""
        if self._lost_at is None:
            return "the others"
        return f"the hub at {self._membership.address}: {self._problem or 'no answer'}"

    def submit(self, version: int, data: bytes) -> None:
        """Send an outer gradient; returns at once."""
        with self._lock:
            self._pending = version, data
            if self._begun:
                self._outgoing.put((messages.Contribution(version), data))

    def give(self, version: int, data: bytes) -> None:
        """Send all parameters, which the hub has asked for; returns at once."""
        self._outgoing.put((messages.Parameters(version), data))

    def get(self, timeout: float) -> Received | None:
        """The next message within ``timeout`` seconds, or None. Raises SetupError and RendezvousError."""
        with contextlib.suppress(queue.Empty):
            return self._incoming.get(timeout=timeout)
        if self._refused:
            raise self._refused
        lost_at = self._lost_at
        if lost_at is not None and time.monotonic() - lost_at > self._patience:
            raise RendezvousError(
                f"worker {self._membership.worker} has not reached the hub at {self._membership.address} for "
                f"{self._patience:g} s: {self._problem or 'no answer'}; check FLK_SERVICE_ADDRESS and that its pod runs"
            )
        return None

    def close(self) -> None:
        """Say that this worker has finished."""
        with self._lock:  # a connection that is made meanwhile drops what is queued before
            self._closing = True
            self._outgoing.put((messages.Bye(), b""))
            self._outgoing.put(None)
        self._thread.join(_CLOSE_TIMEOUT)

    def _run(self) -> None:
        backoff = Backoff(_FIRST_DELAY, _LONGEST_DELAY)
        while not self._closing:
            peer: Peer | None = None
            try:
                peer = self._connect()
                backoff.reset()
                self._serve(peer)
            except VersionError as error:
                self._refused = SetupError(f"worker {self._membership.worker} cannot train with the others: {error}")
            except OSError as error:
                self._problem = str(error) or type(error).__name__
            finally:
                if peer:
                    peer.close()
            if self._refused or self._closing:
                return
            time.sleep(backoff.next())

    def _connect(self) -> Peer:
        host, _, port = self._membership.address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=self._lease)
        try:
            peer = Stream(sock, messages.session(self._membership.secret, serves=False), messages.MESSAGES, self._lease)
            with self._lock:
                if self._closing:
                    raise ConnectionError("closing")
                while not self._outgoing.empty():  # messages for the former connection
                    self._outgoing.get()
                self._begun = False
                hello = messages.Hello(
                    self._membership.worker, self._layout, self._version, self._digest, self._incarnation
                )
            peer.send(hello)
        except BaseException:
            sock.close()
            raise
        return peer

    def _serve(self, peer: Peer) -> None:
        """Send and receive until the connection ends."""
        sender = threading.Thread(target=messages.send_queued, args=(peer, self._outgoing, self._lease), daemon=True)
        sender.start()
        try:
            while True:
                message, length = peer.receive()
                data = peer.receive_bytes(length)
                self._lost_at = None
                match message:
                    case Refused(reason):
                        self._refused = SetupError(f"the hub refuses worker {self._membership.worker}: {reason}")
                        return
                    case messages.Begin() | messages.Give() | messages.CatchUp() | messages.Result():
                        self._note_progress(message)
                        self._incoming.put((message, data))
        finally:
            self._lost_at = time.monotonic()
            peer.close()
            self._outgoing.put((messages.Alive(), b""))  # wakes the sender
            sender.join(self._lease)

    def _note_progress(self, message: FromHub) -> None:
        """Note which version this worker has, and whether the hub takes contributions."""
        with self._lock:
            match message:
                case messages.Result(version):
                    self._version, self._digest = version, ""
                    if self._pending and self._pending[0] == version:
                        self._pending = None
                case messages.CatchUp(version):
                    self._version, self._digest, self._pending = version, "", None
                    self._begun = True
                case messages.Begin():  # the hub has dropped what came before, or has never had it
                    self._begun = True
                    if self._pending:
                        version, data = self._pending
                        self._outgoing.put((messages.Contribution(version), data))
