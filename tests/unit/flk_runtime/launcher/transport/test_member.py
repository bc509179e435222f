"""A member of the rendezvous, with a server on a real connection and a leader of the test's own."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import pytest

from flk_runtime.contract.failure import BEFORE_FIRST, Failure, Kind
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport import Member, Server
from flk_runtime.launcher.transport.messages import Event, Join, Message
from flk_runtime.launcher.transport.server import Leader

FAULT = Failure(Kind.UNHEALTHY, 0, attempt=BEFORE_FIRST, message="GPU 3 is lost")
HISTORY = [Attempt(0, 1.0, 2.0, Failure(Kind.CONTAINER_KILLED, 0))]


class Listener(Leader):
    """A leader that only keeps the messages of members that join."""

    def __init__(self) -> None:
        self.joined: queue.SimpleQueue[Join] = queue.SimpleQueue()

    def received(self, pod: int, message: Message, now: float) -> None:
        if isinstance(message, Join):
            self.joined.put(message)


def test_former_attempts_are_read_and_the_node_is_checked_beside_the_launchers_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the API server or a disk does not answer it takes seconds, in which the launcher handles signals."""
    leader = Listener()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    readers: list[threading.Thread] = []

    def prepare() -> tuple[list[Attempt], bool, list[Failure]]:
        readers.append(threading.current_thread())
        return HISTORY, True, [FAULT]

    settings, log = Settings(("train.py",)), list[str]()
    server = Server(settings, lambda send, store: leader, events.put, print)
    server.start()
    member = Member(settings, server.port, events.put, log.append, lambda: None, prepare)
    member.start()
    join = leader.joined.get(timeout=60)
    assert (join.history, join.failures, join.again) == (HISTORY, [FAULT], True)
    assert len(readers) == 1
    assert threading.main_thread() not in readers
    assert events.empty()


def test_a_lost_leader_has_the_name_of_its_pod_and_not_an_address() -> None:
    leader = Listener()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    settings = Settings(("train.py",), pods=2, pod_name="gpt-worker-0", pod_ip="127.0.0.1")
    server = Server(settings, lambda send, store: leader, events.put, print)
    server.start()
    other = replace(settings, pod=1, pod_name="gpt-worker-1", rendezvous_host="127.0.0.1")
    member = Member(other, server.port, events.put, print, lambda: None, lambda: ([], False, []))
    member.start()
    leader.joined.get(timeout=60)
    assert member._lost(0, "").pod_name == "gpt-worker-0"
