"""Launchers of many pods as one process simulates them, and the process of the leader that they meet.

Each launcher is a connection with the real messages: it introduces itself, joins with an inventory of the checkpoints
in its memory, sends a heartbeat with the status of its ranks three times in a lease, and joins again when an attempt
has ended. It has no ranks. Nothing but the leader runs in the leader's process, so that its CPU time can be read.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.status import RankStatus
from flk_runtime.contract.telemetry import PodStatus
from flk_runtime.launcher.coordinator.leader import Leader
from flk_runtime.launcher.replication import Inventory
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.settings import Limits, Settings
from flk_runtime.launcher.transport import Server
from flk_runtime.launcher.transport.messages import (
    MESSAGES,
    AttemptStarted,
    FailureReport,
    Heartbeat,
    Hello,
    Join,
    Message,
    Welcome,
)
from flk_runtime.wire import Connection, Registry

RANKS: Final = 8  # of each pod
_HOST: Final = "localhost"  # a name that the hosts file resolves
_LIMIT: Final = 60.0  # seconds for one step
_TICKS: Final = os.sysconf("SC_CLK_TCK")  # in a second
_SECRET: Final = "secret"


class Usage(NamedTuple):
    """What the leader's process has used so far."""

    cpu: float  # seconds
    memory: float  # MiB that are resident
    descriptors: int


def serve(pods: int, *, profile: str = "") -> int:
    """Be the leader of so many pods until stdin ends. ``profile`` is a file for the profile of the leader's thread."""
    import torch.distributed  # noqa: F401 - as in the launcher, before the attempt starts

    settings = _settings(0, pods)

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    server = Server(
        settings, lambda send, serve_store: Leader(settings, send, serve_store, log, time.monotonic()), print, log
    )
    if profile:
        import cProfile

        profiler, run = cProfile.Profile(), server._run
        server._run = lambda: profiler.runcall(run)  # type: ignore[method-assign]
    server.start()
    print(server.port, flush=True)
    sys.stdin.read()
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)
    os._exit(0)


@contextmanager
def process(command: list[str]) -> Iterator[tuple[int, Callable[[], Usage]]]:
    """A process that prints its port and ends with its stdin: the port, and what it has used so far."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        port, folder = int(leader.stdout.readline()), Path(f"/proc/{leader.pid}")

        def usage() -> Usage:
            user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            found = re.search(r"VmRSS:\s+(\d+) kB", (folder / "status").read_text())
            memory = int(found[1]) / 1024 if found else 0.0
            return Usage((int(user) + int(system)) / _TICKS, memory, len(os.listdir(folder / "fd")))

        try:
            yield port, usage
        finally:
            leader.stdin.close()
            leader.wait(60)


def allow_descriptors(count: int) -> bool:
    """Allow this process, and those that it starts, so many open files. Returns whether the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard < 0 or hard >= count


def _settings(pod: int, pods: int) -> Settings:
    """The production's settings, but that restarts follow at once."""
    return Settings(
        ("train.py",),
        pod=pod,
        pods=pods,
        processes=RANKS,
        rendezvous_host=_HOST,
        rendezvous_port=0,
        pod_ip="127.0.0.1",
        secret=_SECRET,
        limits=Limits(restarts=100, backoff=0),
    )


class _Received(NamedTuple):
    kind: str
    size: int  # bytes


@dataclass
class _Launcher:
    pod: int
    connection: Connection[Message]
    introduced: bool = False
    heartbeat_at: float = math.inf


class _Kinds(Registry[Message]):
    """Reads only the kind of a message, since one process reads those of all launchers."""

    def encode(self, message: Message) -> bytes:
        return MESSAGES.encode(message)

    def decode(self, data: bytes) -> Any:
        return _Received(json.loads(data[1 : data.index(b",")]), len(data))


_KINDS: Final = _Kinds([])


class Launchers:
    """The launchers of all pods, and their connections to one leader. One thread calls the methods."""

    def __init__(self, pods: int, port: int) -> None:
        self.pods, self._port = pods, port
        self.got: Counter[str] = Counter()
        """Messages of the leader, by kind."""
        self.bytes: Counter[str] = Counter()
        """Bytes of them, as JSON."""
        self.lost = 0
        """Connections that the leader has closed."""
        self._lease = _settings(0, pods).lease
        self._selector = selectors.DefaultSelector()
        self._launchers: dict[int, _Launcher] = {}
        self._beat_at = math.inf  # when the next heartbeat is due
        self._attempt = -1
        self._wanted: Counter[str] = Counter()

    def arrive(self, pods: range) -> None:
        """Have the launchers of these pods connect, authenticate both ends and join, all at once as in a cluster."""
        for pod in pods:
            sock = socket.create_connection((_HOST, self._port))
            session = _settings(pod, self.pods).session(serves=False)
            connection: Connection[Any] = Connection(sock, session, _KINDS, self._lease, 0.0)
            self._launchers[pod] = _Launcher(pod, connection)
            self._selector.register(sock, selectors.EVENT_READ, self._launchers[pod])
        self.wait_for(Welcome, len(pods))

    def fail(self, pod: int) -> None:
        """Have a rank of this pod fail."""
        failure = Failure(Kind.EXCEPTION, pod, pod * RANKS, time=time.time(), type="ValueError", message="bad sample")
        self._launchers[pod].connection.send(FailureReport(self._attempt, failure))

    def join(self) -> None:
        """Have all launchers join the next attempt, as after the end of their ranks."""
        for launcher in self._launchers.values():
            self._join(launcher)

    def wait_for(self, kind: type[Message], launchers: int | None = None) -> float:
        """Exchange messages until so many launchers, by default all, have got a message of this kind; the seconds."""
        began, name = time.monotonic(), kind.__name__
        self._wanted[name] += self.pods if launchers is None else launchers
        while (lacking := self._wanted[name] - self.got[name]) > 0:
            if time.monotonic() > began + _LIMIT or self.lost:
                raise SystemExit(f"{lacking} launchers did not get {name}, and {self.lost} lost their connection")
            self._exchange(1.0)
        return time.monotonic() - began

    def train(self, seconds: float) -> None:
        """Exchange heartbeats for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._exchange(left)

    def close(self) -> None:
        """Close all connections."""
        for launcher in self._launchers.values():
            launcher.connection.close()
        self._selector.close()

    def _join(self, launcher: _Launcher) -> None:
        """Join, with the two latest checkpoints of this pod's ranks and of those of which it holds copies."""
        pod, shards = launcher.pod, []
        if self._attempt >= 0:
            ranks = [each * RANKS + local for each in (pod, (pod - 1) % self.pods) for local in range(RANKS)]
            for number in (1, 2):
                save = CheckpointId(f"{self._attempt:032x}", 100 * number, self.pods * RANKS, number)
                shards += [ShardId(save, rank) for rank in ranks]
        memory = Inventory.of("127.0.0.1", 40000, shards)
        launcher.connection.send(
            Join(f"gpt-worker-{pod}", f"node-{pod}", memory=memory, step=200 + 100 * self._attempt)
        )

    def _exchange(self, seconds: float) -> None:
        """Read what arrives, for at most so long, and send the heartbeats that are due."""
        self._beat()
        for key, mask in self._selector.select(max(0.0, min(seconds, self._beat_at - time.monotonic()))):
            launcher: _Launcher = key.data
            if mask & selectors.EVENT_WRITE:
                launcher.connection.flush()
            try:
                for message in launcher.connection.receive(time.monotonic()):
                    self._handle(launcher, message)
                if launcher.connection.session.met and not launcher.introduced:
                    launcher.introduced = True
                    launcher.connection.send(Hello(launcher.pod, f"{launcher.pod:032x}", 0.0))
            except ConnectionError:
                self.lost += 1
                self._selector.unregister(launcher.connection.socket)

    def _handle(self, launcher: _Launcher, received: Any) -> None:
        self.got[received.kind] += 1
        self.bytes[received.kind] += received.size
        if received.kind == Welcome.__name__:
            # Launchers begin at any time, and so do their heartbeats.
            launcher.heartbeat_at = time.monotonic() + self._lease / 3 * (launcher.pod / self.pods)
            self._beat_at = min(self._beat_at, launcher.heartbeat_at)
            self._join(launcher)
        elif received.kind == AttemptStarted.__name__:
            self._attempt = (self.got[received.kind] - 1) // self.pods

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        for launcher in self._launchers.values():
            if now >= launcher.heartbeat_at:
                launcher.heartbeat_at = now + self._lease / 3
                first = launcher.pod * RANKS
                ranks = [
                    RankStatus(first + each, first // RANKS, 200, idle=0.31, beat=0.31, samples=900, pending=90)
                    for each in range(RANKS)
                ]
                status = PodStatus(self._attempt, ranks) if self._attempt >= 0 else None
                launcher.connection.send(Heartbeat(status))
        self._beat_at = min(launcher.heartbeat_at for launcher in self._launchers.values())
