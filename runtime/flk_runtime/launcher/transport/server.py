"""The rendezvous server in the launcher of pod 0: it accepts and authenticates members, and watches their leases."""

from __future__ import annotations

import contextlib
import errno
import queue
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from flk_runtime.errors import SetupError
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.signals import start_thread
from flk_runtime.launcher.transport.attempt_store import AttemptStore
from flk_runtime.launcher.transport.messages import MESSAGES, Event, Heartbeat, Hello, Message, Welcome
from flk_runtime.wire import Acceptor, Connection, Lease, Refused, Unreadable, listen, was_closed
from flk_runtime.wire.listener import LOOPBACK

_FAREWELL = Lease(10.0)  # seconds in which a launcher that is not admitted must have read that
_SWEEP_INTERVAL = 1.0  # seconds between two looks at all leases
_BIND_TIMEOUT = 60.0  # seconds to wait for a port that is taken, for instance by a launcher that is ending
_BIND_INTERVAL = 0.5  # seconds between two tries


@dataclass(eq=False, slots=True)
class _Peer:
    """The other end of a connection. ``incarnation``, ``began`` and ``pod`` are set when it is admitted."""

    connection: Connection[Message]
    address: str
    opened: float  # or when it was refused
    incarnation: str = ""  # as in Hello
    began: float = 0.0  # when its launcher's process began, by time.monotonic of this one
    pod: int | None = None
    refused: str = ""  # why it is not admitted; it is expected to read that and to close the connection
    broken: str = ""  # why the connection cannot be used any more
    closed: bool = False  # because the peer has closed it
    unreadable: bool = False  # it has sent a message that this launcher cannot read


class Leader(Protocol):
    """The methods of `flk_runtime.launcher.coordinator.leader.Leader` that the server calls; see there."""

    def connected(self, pod: int, incarnation: str) -> None: ...
    def disconnected(self, pod: int, reason: str, now: float, *, closed: bool = False) -> None: ...
    def received(self, pod: int, message: Message, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def due(self) -> float | None: ...
    @property
    def all_know_the_end(self) -> bool: ...


class Server:
    """Connects the members to their leader, in a thread of its own."""

    def __init__(
        self,
        settings: Settings,
        lead: Callable[[Callable[[Collection[int], Message], None], Callable[[], int]], Leader],
        post: Callable[[Event], None],
        log: Callable[[str], None],
    ) -> None:
        """``lead`` makes the leader of functions that send a message to pods, and that replace the ranks' store.

        ``post`` receives the thread's exception, if it ends with one; ``log`` writes a line to the pod's log.
        """
        self._settings = settings
        self._lease = Lease(settings.lease)
        self._post = post
        self._log = log
        self._identity = uuid.uuid4().hex
        self._peers: dict[Connection[Message], _Peer] = {}
        self._members: dict[int, _Peer] = {}  # authenticated, by pod
        self._replaced: set[str] = set()  # incarnations whose pod has another launcher by now
        self._broken: list[_Peer] = []  # to be closed
        self._attempt_store: AttemptStore | None = None
        self._leader = lead(self._send, self._serve_attempt_store)
        self._all_left = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._arrived: queue.SimpleQueue[tuple[Connection[Message], str, Message]] = queue.SimpleQueue()
        self._wakeup, self._wake_end = socket.socketpair()
        for end in (self._wakeup, self._wake_end):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        listener = _listen(settings)
        self.port = int(listener.getsockname()[1])
        self._acceptor = Acceptor(
            listener,
            lambda: settings.session(serves=True),
            MESSAGES,
            log,
            lease=self._lease,
            expected=settings.pods,
        )

    def start(self) -> None:
        """Start the threads, which wait for the members to join."""
        start_thread("rendezvous-server", self._run, self._post)
        start_thread("rendezvous-acceptor", lambda: self._acceptor.run(self._arrive), self._post)

    def wait_for_members_to_leave(self) -> None:
        """Serve until all members know how the job ended, for at most the time of a lease."""
        self._all_left.wait(self._settings.lease)

    def _run(self) -> None:
        sweep_at = time.monotonic()
        while True:
            for key, mask in self._selector.select(self._timeout(sweep_at)):
                if key.data is None:
                    self._take_arrived()
                else:
                    self._handle_io(key.data, mask)
            # Leases are checked after all messages that have arrived are read. So no member loses its lease because
            # this process was stopped for a while.
            now = time.monotonic()
            if now >= sweep_at:
                self._sweep(now)
                sweep_at = now + _SWEEP_INTERVAL
            self._leader.tick(now)
            self._close_broken(now)
            if self._leader.all_know_the_end:
                self._all_left.set()

    def _timeout(self, sweep_at: float) -> float:
        due = self._leader.due()
        return max(0.0, min(sweep_at, sweep_at if due is None else due) - time.monotonic())

    # Connections -------------------------------------------------------------------------------------------------

    def _arrive(self, connection: Connection[Message], address: str, message: Message) -> None:
        """Pass an authenticated connection on to the thread of the server."""
        self._arrived.put((connection, address, message))
        with contextlib.suppress(BlockingIOError):  # that has not yet woken up for the former ones
            self._wake_end.send(b"\0")

    def _take_arrived(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        while not self._arrived.empty():
            connection, address, message = self._arrived.get()
            now = time.monotonic()
            peer = _Peer(connection, address, now)
            self._peers[connection] = peer
            self._selector.register(connection.socket, selectors.EVENT_READ, peer)
            self._handle_message(peer, message, now)
            self._handle_io(peer, 0)

    def _handle_io(self, peer: _Peer, mask: int) -> None:
        if peer.broken:
            return
        now = time.monotonic()
        try:
            if mask & selectors.EVENT_WRITE:
                peer.connection.flush()
                self._watch(peer)
            if mask & selectors.EVENT_READ:
                peer.connection.read(now)
            for message in peer.connection.messages():
                self._handle_message(peer, message, now)
                if peer.broken:
                    return
        except OSError as error:
            self._break(peer, _reason(error), closed=was_closed(error))

    def _handle_message(self, peer: _Peer, message: Message | Unreadable, now: float) -> None:
        if peer.refused:
            return
        if peer.pod is None:
            self._handle_hello(peer, message, now)
            return
        if isinstance(message, Unreadable):
            if not peer.unreadable:
                peer.unreadable = True
                self._log(f"ignored a message of pod {peer.pod}: {message.reason}")
            return
        if isinstance(message, Heartbeat):
            self._send_to([peer], Heartbeat())
        self._leader.received(peer.pod, message, now)

    def _handle_hello(self, peer: _Peer, message: Message | Unreadable, now: float) -> None:
        if not isinstance(message, Hello):
            self._break(peer, "it did not introduce itself")
        elif not 0 <= message.pod < self._settings.pods:
            self._break(peer, f"it says it is pod {message.pod} of {self._settings.pods}")
        else:
            self._admit(peer, message, now)

    def _admit(self, peer: _Peer, hello: Hello, now: float) -> None:
        """Make an authenticated peer the member of its pod, in the place of a former one."""
        former, peer.began = self._members.get(hello.pod), now - hello.age
        # A new leader does not know which launcher has replaced another one. The later one counts.
        again = former and former.incarnation == hello.incarnation
        if former and not again and former.began > peer.began:
            self._replaced.add(hello.incarnation)
        if hello.incarnation in self._replaced:
            self._refuse(peer, f"another launcher has taken the place of pod {hello.pod}", now)
            return
        if former:
            self._leader.disconnected(hello.pod, "it connected again", now)
            if again:
                self._break(former, "it connected again")
            else:
                self._replaced.add(former.incarnation)
                self._refuse(former, f"another launcher has taken the place of pod {hello.pod}", now)
        peer.pod, peer.incarnation = hello.pod, hello.incarnation
        self._members[hello.pod] = peer
        self._send_to([peer], Welcome(self._identity, time.time(), self._settings.pod_name))
        self._leader.connected(hello.pod, hello.incarnation)

    def _refuse(self, peer: _Peer, reason: str, now: float) -> None:
        """Tell a launcher that it is not admitted. It closes the connection when it has read that."""
        self._send_to([peer], Refused(reason))
        peer.refused, peer.pod, peer.opened = reason, None, now

    # Sending and closing -----------------------------------------------------------------------------------------

    def _send(self, pods: Collection[int], message: Message) -> None:
        self._send_to([self._members[pod] for pod in pods if pod in self._members], message)

    def _send_to(self, peers: Collection[_Peer], message: Message) -> None:
        """Send a message, which is encoded once: the plan of checkpoints in memory grows with the number of pods."""
        content = MESSAGES.encode(message)
        for peer in peers:
            if peer.broken:
                continue
            try:
                peer.connection.send_encoded(content)
                self._watch(peer)
            except OSError as error:
                self._break(peer, _reason(error), closed=was_closed(error))

    def _watch(self, peer: _Peer) -> None:
        """Wait for the socket to become writable, as long as there is something to write."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.has_unsent else 0)
        if self._selector.get_key(peer.connection.socket).events != events:
            self._selector.modify(peer.connection.socket, events, peer)

    def _break(self, peer: _Peer, reason: str, *, closed: bool = False) -> None:
        """Give a connection up. It is closed, and the leader told, when no message is being handled."""
        if not peer.broken:
            peer.broken, peer.closed = reason, closed
            self._broken.append(peer)

    def _close_broken(self, now: float) -> None:
        while self._broken:
            peer = self._broken.pop()
            self._selector.unregister(peer.connection.socket)
            peer.connection.close()
            del self._peers[peer.connection]
            if peer.pod is None:
                self._acceptor.refuse(peer.address, peer.refused or peer.broken)
            elif self._members.get(peer.pod) is peer:
                del self._members[peer.pod]
                self._leader.disconnected(peer.pod, peer.broken, now, closed=peer.closed)

    def _sweep(self, now: float) -> None:
        """Give up members whose lease is over, and launchers that do not go though they are not admitted."""
        for peer in self._peers.values():
            refused = peer.pod is None
            silence = _FAREWELL.silence(peer.opened, now) if refused else peer.connection.silence(now)
            if silence:
                self._break(peer, silence)

    def _serve_attempt_store(self) -> int:
        self._attempt_store = AttemptStore(self._post, local=self._settings.local)
        return self._attempt_store.port


def _listen(settings: Settings) -> socket.socket:
    """Listen on all addresses, IPv6 and IPv4; where all pods are on this machine on the loopback interface only.

    Raises SetupError if the port stays taken.
    """
    port = settings.rendezvous_port
    deadline = time.monotonic() + min(_BIND_TIMEOUT, settings.join_timeout)
    while True:
        try:
            return listen(LOOPBACK if settings.local else "", port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise SetupError(
                    f"cannot serve the rendezvous on port {port}: {error.strerror}; another process in this pod, or on "
                    "this node with hostNetwork, holds it"
                ) from error
            time.sleep(_BIND_INTERVAL)


def _reason(error: OSError) -> str:
    return f"it failed: {error.strerror}" if error.strerror else str(error)
