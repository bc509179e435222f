"""The server of the rendezvous, with members on real connections and a leader of the test's own."""

from __future__ import annotations

import queue
import signal
import socket
from collections.abc import Callable, Collection
from datetime import timedelta

import pytest
import torch.distributed as dist

from flk_runtime.launcher.coordinator.leader import Leader
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport import Server
from flk_runtime.launcher.transport.messages import MESSAGES, AttemptStarted, Heartbeat, Hello, Message, Welcome
from flk_runtime.launcher.transport.server import Leader as AnyLeader
from flk_runtime.launcher.transport.server import open_attempt_store
from flk_runtime.wire import Connection, Refused

PODS = 3
STARTED = AttemptStarted(0, "10.0.0.1", 29500, [], "0-2")


class Starter(AnyLeader):
    """A leader that starts an attempt when all pods are connected."""

    def __init__(self, send: Callable[[Collection[int], Message], None]) -> None:
        self.send = send
        self.pods: set[int] = set()

    def connected(self, pod: int, incarnation: str) -> None:
        self.pods.add(pod)
        if len(self.pods) == PODS:
            self.send(self.pods, STARTED)


def connect(port: int, pod: int, incarnation: str = "", age: float = 0.0) -> Connection[Message]:
    """Connect as the launcher of a pod, which began ``age`` seconds ago."""
    sock = socket.create_connection(("127.0.0.1", port))
    session = Settings(("train.py",), pod=pod, pods=PODS).session(serves=False)
    member = Connection(sock, session, MESSAGES, 15.0, 0.0)
    sock.settimeout(60)
    while not session.met:
        list(member.receive(0.0))
    member.send(Hello(pod, incarnation or f"{pod}", age))
    return member


def test_the_start_of_an_attempt_is_encoded_once_for_all_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of attempts is long where there are many pods to send it to."""
    encoded, encode = [], MESSAGES.encode

    def counted(message: Message) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(MESSAGES, "encode", counted)
    failures: list[object] = []
    server = Server(Settings(("train.py",), pods=PODS), lambda send, store: Starter(send), failures.append, print)
    server.start()
    members = [connect(server.port, pod) for pod in range(PODS)]
    for member in members:
        received: list[object] = []
        while STARTED not in received:
            received += member.receive(0.0)
        member.close()
    assert encoded.count(STARTED) == 1
    assert failures == []


def test_of_two_launchers_of_a_pod_the_one_that_began_later_stays() -> None:
    """Each says how old it is, since the clocks of two nodes differ."""
    settings, lines = Settings(("train.py",), pods=PODS), list[str]()
    server = Server(settings, lambda send, store: Starter(send), print, lines.append)
    server.start()

    def first_answer(member: Connection[Message]) -> object:
        while not (received := list(member.receive(0.0))):
            pass
        return received[0]

    first = connect(server.port, 0, "first", 50.0)
    assert isinstance(first_answer(first), Welcome)
    replacement = connect(server.port, 0, "replacement", 1.0)
    assert isinstance(first_answer(replacement), Welcome)
    assert isinstance(first_answer(first), Refused)
    zombie = connect(server.port, 0, "zombie", 60.0)
    assert isinstance(first_answer(zombie), Refused)
    again = connect(server.port, 0, "replacement", 1.1)
    assert isinstance(first_answer(again), Welcome)
    (line,) = lines
    assert line.endswith("127.0.0.1: a later launcher has taken the place of pod 0")
    for member in (first, replacement, zombie, again):
        member.close()


def test_a_message_with_wrong_values_ends_neither_the_leader_nor_other_connections() -> None:
    settings, failures = Settings(("train.py",), pods=PODS), []  # type: ignore[var-annotated]
    lines: list[str] = []

    def lead(send: Callable[[Collection[int], Message], None], serve_ranks_store: Callable[[], int]) -> Leader:
        return Leader(settings, send, serve_ranks_store, lines.append, 0.0)

    server = Server(settings, lead, failures.append, lines.append)
    server.start()
    right = connect(server.port, 2)
    for text in (
        '["Heartbeat",{"status":{"attempt":0,"ranks":[[0,0,1%s,0,0,0,0,0]]}}]' % ("0" * 400),
        '["FailureReport",{"attempt":0,"failure":{"kind":"exception","pod":1,"time":"soon"}}]',
        '["Join",{"pod_name":"a","node":"b","history":[{"number":0,"started":0,"ended":"soon","step":"late"}]}]',
    ):
        wrong = connect(server.port, 1)
        wrong.send_encoded(text.encode())
        wrong.socket.setblocking(True)
        while wrong.socket.recv(4096):  # until the server closes it
            pass
        wrong.close()
    right.send(Heartbeat())
    received: list[object] = []
    while Heartbeat() not in received:
        received += right.receive(0.0)
    right.close()
    assert failures == []


def test_launchers_of_one_machine_meet_on_its_loopback_interface() -> None:
    for settings, local in (
        (Settings(("train.py",), pods=PODS, pod_ip="127.0.0.1"), True),  # `flk run`
        (Settings(("train.py",)), True),
        (Settings(("train.py",), pods=PODS, pod_ip="10.0.0.1"), False),
        (Settings(("train.py",), pods=PODS), False),
    ):
        server = Server(settings, lambda send, store: Starter(send), print, print)
        server.start()
        try:
            socket.create_connection(("127.0.0.2", server.port)).close()
            reached = True
        except ConnectionRefusedError:
            reached = False
        assert reached is not local


@pytest.mark.parametrize("local", [True, False], ids=["on this machine", "of pods"])
def test_ranks_meet_there(local: bool) -> None:
    store = open_attempt_store(local=local)
    if local:  # another address of this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", store.port))
    ranks = [dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=60)) for _ in range(2)]  # type: ignore[attr-defined]
    ranks[0].set("key", "value")
    assert ranks[1].get("key") == b"value"


def test_a_launcher_that_claims_a_place_which_the_job_does_not_have_is_named() -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = Server(Settings(("train.py",), pods=PODS), lambda send, store: Starter(send), print, lines.put)
    server.start()
    with connect(server.port, 7).socket:
        line = lines.get(timeout=60)
    assert "127.0.0.1: it is none of the 3 pods of the job: Hello(pod=7, " in line


@pytest.mark.parametrize(("seconds", "signals"), [(600.0, [signal.SIGTERM]), (0.1, [])])
def test_the_wait_for_members_that_do_not_know_the_end_is_over_at_a_signal_and_in_time(
    seconds: float, signals: list[int]
) -> None:
    server = Server(Settings(("train.py",), pods=PODS), lambda send, store: Starter(send), print, print)
    server.start()
    assert not server.wait_for_members_to_leave(seconds, signals)
