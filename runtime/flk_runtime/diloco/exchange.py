"""Exchange: the connection of a worker's rank 0 to the hub, which threads keep up; and that of a worker alone."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flk_runtime.diloco.frames import LEASE, Frames
from flk_runtime.diloco.options import Membership
from flk_runtime.diloco.tls import TlsSocket
from flk_runtime.errors import RendezvousError, SetupError

Message = tuple[dict[str, Any], bytes | bytearray]
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds between two attempts to connect
_NOTICE = 30.0  # seconds without a connection after which its problem is reported
_CLOSE_TIMEOUT = 10.0  # seconds in which the last messages are sent


class Exchange(Protocol):
    """Sends a worker's outer gradients, and receives averages and parameters in the order of the hub."""

    @property
    def sent(self) -> int:
        """Bytes on the wire, so far."""

    @property
    def received(self) -> int:
        """Bytes on the wire, so far."""

    def submit(self, fragment: int, version: int, data: bytes) -> None:
        """Send an outer gradient; returns at once."""

    def give(self, versions: list[int], data: bytes) -> None:
        """Send all parameters, which the hub has asked for; returns at once."""

    def get(self, timeout: float) -> Message | None:
        """The next message within ``timeout`` seconds, or None. Raises SetupError and RendezvousError."""

    def close(self) -> None:
        """Say that this worker has finished."""


class Alone:
    """The exchange of the only worker: the average is its own contribution."""

    sent = received = 0

    def __init__(self) -> None:
        self._results: list[Message] = [({"type": "begin", "workers": 1}, b"")]

    def submit(self, fragment: int, version: int, data: bytes) -> None:
        header = {"type": "result", "fragment": fragment, "version": version, "workers": 1, "joins": False}
        self._results.append((header, data))

    def give(self, versions: list[int], data: bytes) -> None:
        raise AssertionError("there is no other worker")

    def get(self, timeout: float) -> Message | None:
        return self._results.pop(0) if self._results else None

    def close(self) -> None:
        pass


class HubExchange:
    """The exchange through a hub. It connects again when the connection breaks, for as long as ``patience``."""

    def __init__(
        self,
        membership: Membership,
        layout: dict[str, Any],
        versions: Sequence[int],
        digest: str,
        *,
        patience: float,
        log: Callable[[str], None],
        lease: float = LEASE,
    ) -> None:
        """``versions`` of the fragments that this worker has, and ``digest`` of its parameters before its first round.

        ``patience``: seconds without a hub after which `get` raises RendezvousError. ``log`` takes a line.
        """
        self._membership, self._layout, self._digest = membership, layout, digest
        self._patience, self._log, self._lease = patience, log, lease
        self._incarnation = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._versions = list(versions)  # received
        self._pending: dict[tuple[int, int], bytes] = {}  # contributions without a result
        self._incoming: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._frames: Frames | None = None
        self._begun = False  # the hub of this connection takes contributions
        self._counted = [0, 0]  # sent and received over earlier connections
        self._refused: SetupError | None = None
        self._problem = self._said = ""  # why there is no connection, and what of it is in the log
        self._lost_at: float | None = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def sent(self) -> int:
        """Bytes sent so far."""
        with self._lock:
            return self._counted[0] + (self._frames.sent if self._frames else 0)

    @property
    def received(self) -> int:
        """Bytes received so far."""
        with self._lock:
            return self._counted[1] + (self._frames.received if self._frames else 0)

    def submit(self, fragment: int, version: int, data: bytes) -> None:
        with self._lock:
            self._pending[fragment, version] = data
            if self._begun:
                self._outgoing.put(_contribution(fragment, version, data))

    def give(self, versions: list[int], data: bytes) -> None:
        self._outgoing.put(({"type": "state", "versions": versions}, data))

    def get(self, timeout: float) -> Message | None:
        with contextlib.suppress(queue.Empty):
            return self._incoming.get(timeout=timeout)
        if self._refused:
            raise self._refused
        lost_at = self._lost_at
        if lost_at is not None and time.monotonic() - lost_at > self._patience:
            raise RendezvousError(
                f"worker {self._membership.worker} has not reached the hub at {self._membership.address} for "
                f"{self._patience:g} s: {self._problem or 'no answer'}; check FLK_MEET and that its pod runs"
            )
        return None

    def close(self) -> None:
        self._closing = True
        self._outgoing.put(({"type": "bye"}, b""))
        self._outgoing.put(None)
        self._thread.join(_CLOSE_TIMEOUT)

    def _run(self) -> None:
        delay = _FIRST_DELAY
        while not self._closing:
            frames: Frames | None = None
            try:
                frames = self._connect()
                delay = _FIRST_DELAY
                self._serve(frames)
            except (OSError, KeyError, TypeError, ValueError) as error:
                self._note(str(error) or type(error).__name__)
            finally:
                if frames:
                    frames.close()
                    with self._lock:
                        self._counted[0] += frames.sent
                        self._counted[1] += frames.received
                        self._frames = None
            if self._refused or self._closing:
                return
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    def _connect(self) -> Frames:
        host, _, port = self._membership.address.rpartition(":")
        tcp = socket.create_connection((host.strip("[]"), int(port)), timeout=self._lease)
        sock: socket.socket | TlsSocket = tcp
        try:
            if self._membership.ca:
                # Whoever has a certificate of this authority and the secret is the hub, under whatever name.
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname = False
                context.load_verify_locations(self._membership.ca)
                sock = TlsSocket(context.wrap_socket(tcp))
            frames = Frames(sock)
            frames.shake_hands(self._membership.secret, serves=False, timeout=self._lease)
            with self._lock:
                if self._closing:
                    raise ConnectionError("closing")
                while not self._outgoing.empty():  # what is left of the former connection
                    self._outgoing.get()
                self._begun = False
                hello = {
                    "worker": self._membership.worker,
                    "layout": self._layout,
                    "versions": list(self._versions),
                    "digest": self._digest,
                    "incarnation": self._incarnation,
                }
                self._frames = frames
            frames.send(hello)
        except BaseException:
            sock.close()
            raise
        return frames

    def _serve(self, frames: Frames) -> None:
        """Send and receive until the connection ends."""
        sender = threading.Thread(target=self._send, args=(frames,), daemon=True)
        sender.start()
        try:
            while True:
                header, data = frames.receive()
                self._lost_at = None
                kind = header["type"]
                if kind == "refused":
                    self._refused = SetupError(f"the hub refuses worker {self._membership.worker}: {header['reason']}")
                    return
                if kind == "result":
                    with self._lock:
                        self._versions[header["fragment"]], self._digest = header["version"], ""
                        self._pending.pop((header["fragment"], header["version"]), None)
                elif kind == "state":
                    with self._lock:
                        self._versions, self._digest = list(header["versions"]), ""
                        self._pending.clear()
                        self._begun = True
                elif kind == "begin":  # the hub has dropped what came before, or has never had it
                    with self._lock:
                        self._begun = True
                        for key, contribution in sorted(self._pending.items()):
                            self._outgoing.put(_contribution(*key, contribution))
                if kind != "alive":
                    self._incoming.put((header, data))
        finally:
            self._lost_at = time.monotonic()
            frames.close()
            self._outgoing.put(({"type": "alive"}, b""))  # wakes the sender
            sender.join(self._lease)

    def _send(self, frames: Frames) -> None:
        with contextlib.suppress(OSError):
            while self._frames is frames:
                try:
                    item = self._outgoing.get(timeout=self._lease / 3)
                except queue.Empty:
                    item = ({"type": "alive"}, b"")
                if item is None:
                    break
                frames.send(*item)
        frames.close()

    def _note(self, problem: str) -> None:
        if self._closing:
            return
        self._problem = problem
        lost_at = self._lost_at
        if problem != self._said and lost_at and time.monotonic() - lost_at > _NOTICE:
            self._said = problem
            self._log(f"no connection to the hub at {self._membership.address}: {problem}; trying again")


def _contribution(fragment: int, version: int, data: bytes) -> Message:
    return {"type": "contribution", "fragment": fragment, "version": version}, data
