"""The rendezvous server in the launcher of pod 0: it accepts and authenticates members, and watches their leases.

It also serves the ranks' store, a TCPStore of torch that is new for each attempt.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from flk_runtime.errors import SetupError
from flk_runtime.launcher.control import start_thread
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport.messages import MESSAGES, Event, Heartbeat, Hello, Message, Send, Welcome
from flk_runtime.launcher.transport.peers import Peer, PeerLoop
from flk_runtime.wire import Acceptor, Connection, Refused, listen, reason, was_closed
from flk_runtime.wire.listener import LOOPBACK

_SWEEP_INTERVAL = 1.0  # seconds between two looks at all leases
_POLL = 0.5  # seconds between two looks whether a signal has come
_BIND_TIMEOUT = 60.0  # seconds to wait for a port that is taken, for instance by a launcher that is ending
_BIND_INTERVAL = 0.5  # seconds between two tries


@dataclass(eq=False)
class _Member(Peer):
    """The launcher of a pod that takes part."""

    pod: int = 0
    incarnation: str = ""  # as in Hello
    began: float = 0.0  # when its launcher's process began, by time.monotonic of this one


_Arrival = tuple[Connection[Message], str, Message]  # an authenticated connection, its address and its first message


class Leader(Protocol):
    """The methods of `flk_runtime.launcher.coordinator.leader.Leader` that the server calls; see there."""

    def connected(self, pod: int, incarnation: str) -> None:
        """A launcher of this pod has connected."""

    def disconnected(self, pod: int, reason: str, now: float, *, closed: bool = False) -> None:
        """Its connection is gone."""

    def received(self, pod: int, message: Message, now: float) -> None:
        """It has sent a message."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def due(self) -> float | None:
        """When something is."""

    @property
    def all_know_the_end(self) -> bool:
        """Whether nobody has to be told of the end any more."""


class Server:
    """Connects the members to their leader, in a thread of its own."""

    def __init__(
        self,
        settings: Settings,
        lead: Callable[[Send, Callable[[], int]], Leader],
        post: Callable[[Event], None],
        log: Callable[[str], None],
    ) -> None:
        """``lead`` makes the leader of functions that send a message to pods, and that replace the ranks' store.

        ``post`` receives the thread's exception, if it ends with one; ``log`` writes a line to the pod's log.
        """
        self._settings = settings
        self._post = post
        self._identity = uuid.uuid4().hex
        self._members: dict[int, _Member] = {}  # by pod
        self._loop: PeerLoop[_Member, _Arrival] = PeerLoop()
        self._attempt_store: Any = None  # of torch
        self._leader = lead(self._send, self._serve_attempt_store)
        self._all_left = threading.Event()
        listener = _listen(settings)
        self.port = int(listener.getsockname()[1])
        self._acceptor = Acceptor(
            listener,
            lambda: settings.session(serves=True),
            MESSAGES,
            log,
            lease=settings.lease,
            expected=settings.pods,
        )

    def start(self) -> None:
        """Start the threads, which wait for the members to join."""
        start_thread("rendezvous-server", self._run, self._post)
        start_thread("rendezvous-acceptor", lambda: self._acceptor.run(lambda *it: self._loop.put(it)), self._post)

    def wait_for_members_to_leave(self, seconds: float, signals: Sequence[int]) -> bool:
        """Serve until all members know how the job ended, a signal comes, or the time is over.

        Returns whether all of them know it.
        """
        end = time.monotonic() + seconds
        while not signals and time.monotonic() < end:
            if self._all_left.wait(_POLL):
                break
        return self._all_left.is_set()

    def _run(self) -> None:
        sweep_at = time.monotonic()
        while True:
            for peer, message in self._loop.messages(self._timeout(sweep_at)):
                if isinstance(message, Heartbeat):
                    self._loop.send([peer], Heartbeat())
                self._leader.received(peer.pod, message, time.monotonic())
            for arrival in self._loop.items():
                self._take(*arrival)
            # Leases are checked after all messages that have arrived are read. So no member loses its lease because
            # this process was stopped for a while.
            now = time.monotonic()
            if now >= sweep_at:
                for member in self._members.values():
                    if silence := member.connection.silence(now):
                        self._loop.give_up(member, ConnectionError(silence))
                sweep_at = now + _SWEEP_INTERVAL
            self._leader.tick(now)
            for member, error in self._loop.take_broken():
                if self._members.get(member.pod) is member:
                    del self._members[member.pod]
                    self._leader.disconnected(member.pod, reason(error), now, closed=was_closed(error))
            if self._leader.all_know_the_end:
                self._all_left.set()

    def _timeout(self, sweep_at: float) -> float:
        due = self._leader.due()
        return max(0.0, min(sweep_at, sweep_at if due is None else due) - time.monotonic())

    # Connections -------------------------------------------------------------------------------------------------

    def _take(self, connection: Connection[Message], address: str, hello: Message) -> None:
        """Take an authenticated connection over from the thread of the acceptor. The later launcher of a pod counts."""
        if not isinstance(hello, Hello) or not 0 <= hello.pod < self._settings.pods:
            connection.close()
            self._acceptor.refuse(address, f"it is none of the {self._settings.pods} pods of the job: {hello!s:.80}")
            return
        now = time.monotonic()
        peer = _Member(connection, None, hello.pod, hello.incarnation, now - hello.age)
        self._loop.add(peer)
        if former := self._members.get(peer.pod):
            if former.incarnation != peer.incarnation and former.began > peer.began:
                self._refuse(peer)
                self._acceptor.refuse(address, f"a later launcher has taken the place of pod {peer.pod}")
                return
            self._leader.disconnected(peer.pod, "it connected again", now)
            self._refuse(former)
        self._members[peer.pod] = peer
        self._loop.send([peer], Welcome(self._identity, self._settings.pod_name))
        self._leader.connected(peer.pod, peer.incarnation)

    def _refuse(self, peer: _Member) -> None:
        why = f"another launcher has taken the place of pod {peer.pod}"
        self._loop.send([peer], Refused(why))
        self._loop.give_up(peer, ConnectionError(why))

    def _send(self, pods: Collection[int], message: Message) -> None:
        self._loop.send([self._members[pod] for pod in pods if pod in self._members], message)

    def _serve_attempt_store(self) -> int:
        self._attempt_store = open_attempt_store(local=self._settings.local)
        return int(self._attempt_store.port)


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


_TIMEOUT = timedelta(seconds=30)  # of the server's own connection to itself


def open_attempt_store(*, local: bool) -> Any:
    """An empty TCPStore on a free port of this pod; ``local``: on its loopback interface only.

    It is closed with the last reference to it. Torch has been imported before, since that takes seconds.
    """
    import torch.distributed as dist

    options: dict[str, Any] = {"port": 0}
    if local:
        listener = listen(LOOPBACK, 0)
        # Before torch 2.8, libuv's server does not listen on a socket that it is given.
        options = {"port": int(listener.getsockname()[1]), "master_listen_fd": listener.detach(), "use_libuv": False}
    return dist.TCPStore(  # type: ignore[attr-defined]
        "0.0.0.0",  # noqa: S104 - the ranks of all pods connect to it
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        **options,
    )
