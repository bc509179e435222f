"""Measure the rendezvous with many launchers: time to agree on an attempt, memory and descriptors of the leader.

    python benchmarks/rendezvous.py [--rounds 6] [--launchers 1000]

One process is the leader. Another one simulates the launchers of all pods: each opens a connection, authenticates,
joins, and learns of the attempt. Then one of them reports a failure, all learn of it, join again and learn of the next
attempt. The peer is torch's TCPStore with the keys that each launcher and the leader would write and read there: one
connection, a key for joining, and a key for the decision. The store neither authenticates nor watches its clients. It
looks up the name of each of them when it connects. So that this waits for no name server, the store runs with a hosts
file that has the name, in a mount namespace of its own, which needs root.
Growth is the ratio of the figures of flk with all launchers and with a tenth of them. Goals: no later start than with
the store, at most ten times its restart and three times its memory, which are small; growth in proportion.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import measure
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.launcher import coordinator
from flk_runtime.launcher.settings import Limits, Settings
from flk_runtime.launcher.transport import AttemptEnded, AttemptStarted
from flk_runtime.launcher.transport.messages import MESSAGES, FailureReport, Hello, Join, Message, Welcome
from flk_runtime.wire import Connection

LEASE = 600.0  # seconds; the launchers of this benchmark send no heartbeats
LIMIT = 300.0  # seconds for one step
CLIENT = "::ffff:127.0.0.1"  # as the store sees a client on this machine


class Figures(NamedTuple):
    """The result of one measurement."""

    start: float  # seconds until all launchers have connected and know of the attempt
    restart: float  # seconds from the report of a failure until all know of the next attempt
    memory: float  # growth of the leader's memory in MiB
    descriptors: float  # descriptors that the leader has opened


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--launchers", type=int, default=1000)
    parser.add_argument("--serve", choices=["flk", "store"], help="be the leader (the benchmark starts it so)")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    many, few = arguments.launchers, max(2, arguments.launchers // 10)
    if arguments.serve:
        return serve_flk(many) if arguments.serve == "flk" else serve_store(many)
    if 0 < hard < 2 * many + 100:
        measure.skip(f"the limit of open files is {hard}")
    if os.geteuid():
        measure.skip("the store's hosts file needs root")
    report = measure.Report("rendezvous", arguments)
    found = measure.alternate(
        {"flk": lambda: measure_flk(many), "TCPStore": lambda: measure_store(many), "few": lambda: measure_flk(few)},
        arguments.rounds,
        show=lambda figures: f"{figures.start:.2f} s, {figures.restart:.2f} s, {figures.memory:.1f} MiB",
    )
    units = {"start": "s", "restart": "s", "memory": "MiB", "descriptors": "files"}
    # The store's server and clients are C++; flk's are Python, and compute a code for each message.
    goals = {"start": 1.0, "restart": 10.0, "memory": 3.0, "descriptors": 1.05}
    for name, unit in units.items():
        ours, theirs, small = ([getattr(each, name) for each in found[key]] for key in ("flk", "TCPStore", "few"))
        report.compare(f"{name} of {many} launchers, flk / TCPStore", ours, theirs, measure.at_most(goals[name]), unit)
        growth = measure.at_most(1.5 * many / few)
        report.compare(f"{name} of flk, {many} launchers / {few}", ours, small, growth, unit)
    return report.finish()


# flk -----------------------------------------------------------------------------------------------------------------


def serve_flk(launchers: int) -> int:
    """Run the leader of so many launchers until stdin ends."""
    import torch.distributed  # noqa: F401 - as in the launcher, before the attempt starts

    settings = Settings(
        ("train.py",),
        pods=launchers,
        rendezvous_port=free_port(),
        pod_ip="127.0.0.1",
        lease=LEASE,
        secret="secret",
        limits=Limits(restarts=5, backoff=0),
    )
    server = coordinator.serve(settings, print, lambda text: None)
    server.start()
    print(server.port, flush=True)
    sys.stdin.read()
    os._exit(0)


def measure_flk(launchers: int) -> Figures:
    with leader("flk", launchers) as (port, usage), selectors.DefaultSelector() as selector:
        before = usage()
        began = time.perf_counter()
        members = [open_member(pod, launchers, port) for pod in range(launchers)]
        for member in members:
            selector.register(member.socket, selectors.EVENT_READ, member)
        join(members)
        exchange(selector, launchers, AttemptStarted)
        start = time.perf_counter() - began
        began = time.perf_counter()
        failure = Failure(Kind.EXCEPTION, 1, 1, time=time.time(), type="ValueError", message="bad sample")
        members[1].send(FailureReport(0, failure))
        exchange(selector, launchers, AttemptEnded)
        join(members)
        exchange(selector, launchers, AttemptStarted)
        restart = time.perf_counter() - began
        after = usage()
        for member in members:
            member.close()
    return Figures(start, restart, after[0] - before[0], after[1] - before[1])


def open_member(pod: int, pods: int, port: int) -> Connection[Message]:
    """Connect as the launcher of a pod, and authenticate both ends."""
    sock = socket.create_connection(("127.0.0.1", port))
    settings = Settings(("train.py",), pod=pod, pods=pods, secret="secret")
    session = settings.session(serves=False)
    member = Connection(sock, session, MESSAGES, LEASE, 0.0)
    sock.settimeout(LIMIT)
    while not session.met:
        list(member.receive(0.0))
    member.send(Hello(pod, f"{pod}", 0.0))
    (welcome,) = member.receive(0.0)
    sock.setblocking(False)
    if not isinstance(welcome, Welcome):
        raise SystemExit(f"the leader answered {welcome}")
    return member


def join(members: list[Connection[Message]]) -> None:
    for pod, member in enumerate(members):
        member.send(Join(f"gpt-worker-{pod}", f"node-{pod}"))


def exchange(selector: selectors.BaseSelector, launchers: int, kind: type[Message]) -> None:
    """Read until every launcher has got a message of this kind."""
    waiting = launchers
    deadline = time.monotonic() + LIMIT
    while waiting:
        if time.monotonic() > deadline:
            raise SystemExit(f"{waiting} of {launchers} launchers did not get {kind.__name__} in {LIMIT:.0f} s")
        for key, _ in selector.select(1.0):
            waiting -= sum(isinstance(message, kind) for message in key.data.receive(0.0))


# TCPStore ------------------------------------------------------------------------------------------------------------


def serve_store(launchers: int) -> int:
    """Run the store, and read and write it as the leader does, until stdin ends."""
    store = new_store(0, serve=True)
    print(store.port, flush=True)
    for attempt in range(2):
        keys = [f"{attempt}/join/{pod}" for pod in range(launchers)]
        store.wait(keys, timedelta(seconds=LIMIT))
        joins = [json.loads(store.get(key)) for key in keys]
        store.set(f"{attempt}/start", json.dumps({"number": attempt, "pods": len(joins)}))
    sys.stdin.read()
    os._exit(0)


def measure_store(launchers: int) -> Figures:
    import torch.distributed  # noqa: F401 - its import is not measured

    with leader("store", launchers) as (port, usage):
        before = usage()
        began = time.perf_counter()
        with ThreadPoolExecutor(64) as threads:  # each waits for the server's answer
            clients = list(threads.map(lambda _: new_store(port), range(launchers)))

        def agree(attempt: int) -> None:
            for pod, client in enumerate(clients):
                client.set(
                    f"{attempt}/join/{pod}", json.dumps({"pod_name": f"gpt-worker-{pod}", "node": f"node-{pod}"})
                )
            for client in clients:
                client.get(f"{attempt}/start")

        agree(0)
        start = time.perf_counter() - began
        began = time.perf_counter()
        clients[1].set("0/end", "failure")
        for client in clients:
            client.get("0/end")
        agree(1)
        restart = time.perf_counter() - began
        after = usage()
    return Figures(start, restart, after[0] - before[0], after[1] - before[1])


def new_store(port: int, *, serve: bool = False) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=serve, wait_for_workers=False)  # type: ignore[attr-defined]


# The leader's process ------------------------------------------------------------------------------------------------


@contextmanager
def leader(kind: str, launchers: int) -> Iterator[tuple[int, Callable[[], tuple[float, int]]]]:
    """A process that is the leader: its port, and a function that returns its memory in MiB and its descriptors."""
    command = [sys.executable, __file__, "--serve", kind, "--launchers", str(launchers)]
    with tempfile.NamedTemporaryFile("w") as hosts, contextlib.ExitStack() as stack:
        if kind == "store":
            hosts.write(f"{CLIENT} localhost\n127.0.0.1 localhost\n")
            hosts.flush()
            mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, hosts.name, *command]
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        if process.stdin is None or process.stdout is None:
            raise SystemExit("the leader has no pipes")
        port = int(process.stdout.readline())

        def usage() -> tuple[float, int]:
            status = Path(f"/proc/{process.pid}/status").read_text()
            found = re.search(r"VmRSS:\s+(\d+) kB", status)
            return int(found[1]) / 1024 if found else 0.0, len(os.listdir(f"/proc/{process.pid}/fd"))

        try:
            yield port, usage
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
