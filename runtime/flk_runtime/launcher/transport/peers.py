"""PeerLoop: the connections that one thread of the rendezvous serves, and what other threads hand it.

The server has one for the connections of all members, and each member has one for its connection to the leader.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from flk_runtime.launcher.control import Wakeup
from flk_runtime.launcher.transport.messages import MESSAGES, Message
from flk_runtime.wire import Connection

T = TypeVar("T")


@dataclass(eq=False)
class Peer:
    """The other end of a connection."""

    connection: Connection[Message]
    error: OSError | None = None  # why the connection cannot be used any more


P = TypeVar("P", bound=Peer)


class PeerLoop(Generic[P, T]):
    """One thread calls all methods but `put`. None of them waits but `messages`, and none raises an OSError."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup.socket, selectors.EVENT_READ)
        self._new: list[P] = []  # messages of theirs may have been read before
        self._broken: list[tuple[P, OSError]] = []

    def put(self, item: T) -> None:
        """Hand an item to the thread of the loop, which wakes up. Any thread may call this."""
        self._wakeup.post(item)

    def items(self) -> Iterator[T]:
        """Yield what other threads have put."""
        while not self._wakeup.events.empty():
            yield self._wakeup.events.get()

    def add(self, peer: P) -> None:
        """Serve a connection too."""
        self._selector.register(peer.connection.socket, selectors.EVENT_READ, peer)
        self._new.append(peer)

    def send(self, peers: Collection[P], message: Message) -> None:
        """Send a message, which is encoded once: the plan of checkpoints in memory grows with the number of pods."""
        content = MESSAGES.encode(message)
        for peer in peers:
            if peer.error:
                continue
            try:
                peer.connection.send_encoded(content)
                self._watch(peer)
            except OSError as error:
                self.give_up(peer, error)

    def messages(self, timeout: float) -> Iterator[tuple[P, Message]]:
        """Wait for at most ``timeout`` seconds, and yield the messages that have arrived, each with its sender."""
        ready = self._selector.select(0.0 if self._new else timeout)
        new, self._new = self._new, []
        for peer, events in [*((peer, 0) for peer in new), *((key.data, events) for key, events in ready)]:
            if peer is None:
                self._wakeup.clear()
            else:
                yield from self._read(peer, events)

    def give_up(self, peer: P, error: OSError) -> None:
        """Use a connection no more. It is closed by `take_broken`, when no message is being handled."""
        if not peer.error:
            peer.error = error
            self._broken.append((peer, error))

    def take_broken(self) -> Iterator[tuple[P, OSError]]:
        """Close the connections that were given up, and yield them with the reasons."""
        while self._broken:
            peer, error = self._broken.pop()
            self._selector.unregister(peer.connection.socket)
            peer.connection.close()
            yield peer, error

    def _read(self, peer: P, events: int) -> Iterator[tuple[P, Message]]:
        if peer.error:
            return
        try:
            if events & selectors.EVENT_WRITE:
                peer.connection.flush()
                self._watch(peer)
            if events & selectors.EVENT_READ:
                peer.connection.read(time.monotonic())
            for message in peer.connection.messages():
                yield peer, message
                if peer.error:
                    return
        except OSError as error:
            self.give_up(peer, error)

    def _watch(self, peer: P) -> None:
        """Wait for the socket to become writable, as long as there is something to write."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.has_unsent else 0)
        if self._selector.get_key(peer.connection.socket).events != events:
            self._selector.modify(peer.connection.socket, events, peer)
