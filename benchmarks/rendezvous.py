"""Measure the leader of many launchers with production's settings: attempts that start, fail and follow.

    python benchmarks/rendezvous.py [--rounds 6] [--launchers 1000]
    python benchmarks/rendezvous.py --profile FILE [--launchers 1000]

One process is the leader. Another one simulates the launchers of all pods, of 8 ranks each, with the default lease,
heartbeats and checkpoints in memory (`simulated_launchers`). All but the last one connect and join; then the last one
does, and all learn of the attempt. For longer than a lease they send heartbeats. Then a rank fails, all learn of it,
join again with what their memory holds, and learn of the next attempt. Goals: an attempt starts within 3 s of the last
arrival, and all of a start takes at most 1 s of the leader's CPU time; a failed attempt ends within 1 s everywhere; no
launcher loses its lease; the bytes that a pod gets do not grow with the number of pods, and times grow in proportion.

The peer is torch's TCPStore with the keys that each launcher and the leader would write and read there: one
connection, a key for joining, and a key for the decision. The store neither authenticates nor watches its clients,
and knows of no checkpoints. It looks up the name of each client that connects, and the client looks up the store's.
So that nothing waits for a name server, all run with a hosts file that has these names, in a mount namespace of their
own, which needs root.

--profile measures nothing. It writes the profile of the leader's thread in a start and a restart.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import measure
import simulated_launchers
from flk_runtime.contract.user_env import LEASE
from flk_runtime.launcher.replication import MemoryPlan
from flk_runtime.launcher.transport.messages import AttemptEnded, AttemptStarted
from simulated_launchers import Launchers, Usage

LIMIT = 120.0  # seconds for one step of the store
END = "::ffff:127.0.0.1"  # as each end of a connection of the store sees the other one
HAS_NAMES = "BENCHMARK_HAS_NAMES"  # environment variable of a process with the hosts file
HOLD = 1.2 * LEASE.default  # seconds with heartbeats only: a lease that is lost is lost in this time


class Figures(NamedTuple):
    """The result of one measurement. Times are in seconds."""

    all_start: float  # until all launchers have connected and know of the attempt
    start: float  # from the arrival of the last launcher until all know of the attempt
    start_cpu: float  # of the leader, for all connections and the start
    end: float  # from the report of a failure until all launchers know of it
    restart: float  # from there until all know of the next attempt
    restart_cpu: float  # of the leader
    heartbeat_cpu: float  # of the leader, in each second in which nothing but heartbeats happens
    kept: float  # share of the connections that are open at the end
    bytes: float  # that each pod gets when an attempt starts that restores a checkpoint in memory
    memory: float  # growth of the leader's memory in MiB
    descriptors: float  # that the leader has opened


def main() -> int:
    parser = measure.parser(__doc__, rounds=6)
    parser.add_argument("--launchers", type=int, default=1000)
    parser.add_argument("--profile", metavar="FILE", default="")
    parser.add_argument("--serve", choices=["flk", "store"], help="be the leader (the benchmark starts it so)")
    arguments = parser.parse_args()
    many, few = arguments.launchers, max(2, arguments.launchers // 10)
    enough = simulated_launchers.allow_descriptors(2 * many + 100)
    if arguments.serve == "flk":
        return simulated_launchers.serve(many, profile=arguments.profile)
    if arguments.serve:
        return serve_store(many)
    if not enough:
        measure.skip("the limit of open files is too low")
    if arguments.profile:
        print(json.dumps(measure_flk(many, profile=arguments.profile)._asdict()))
        return 0
    if os.geteuid():
        measure.skip("the hosts file needs root")
    if HAS_NAMES not in os.environ:
        start_with_names()
    if (name := socket.getnameinfo((END, 0), socket.NI_NUMERICSERV)[0]) != "localhost":
        raise SystemExit(f"{END} is {name} and not localhost, so the store would wait for name servers")
    cases = {"flk": lambda: measure_flk(many), "TCPStore": lambda: measure_store(many), "few": lambda: measure_flk(few)}
    return report(arguments, many, few, measure.alternate(cases, arguments.rounds, show=shown))


def shown(figures: Figures) -> str:
    return f"{figures.start:.2f} s, {figures.start_cpu:.2f} s CPU, {figures.restart:.2f} s, {figures.memory:.1f} MiB"


def report(arguments: argparse.Namespace, many: int, few: int, found: dict[str, list[Figures]]) -> int:
    """Compare the figures with the limits, with those of fewer launchers, and with the store's."""
    made = measure.Report("rendezvous", arguments)

    def compare(what: str, name: str, case: str, other: str | float, goal: measure.Goal, unit: str) -> None:
        ours = [float(getattr(each, name)) for each in found[case]]
        theirs = (
            [float(getattr(each, name)) for each in found[other]] if isinstance(other, str) else [other] * len(ours)
        )
        made.compare(what, ours, theirs, goal, unit)

    of = f"of {many:,} launchers of {simulated_launchers.RANKS} ranks"
    heartbeats = f"leader's CPU time for the heartbeats {of}, in a second / limit"
    compare(f"start {of} after the last arrival / limit", "start", "flk", 3.0, measure.at_most(1.0), "s")
    compare(f"leader's CPU time for a start {of} / limit", "start_cpu", "flk", 1.0, measure.at_most(1.0), "s")
    compare(f"end of a failed attempt {of} / limit", "end", "flk", 1.0, measure.at_most(1.0), "s")
    compare(f"leader's CPU time for a restart {of} / limit", "restart_cpu", "flk", 1.0, measure.at_most(1.0), "s")
    compare(heartbeats, "heartbeat_cpu", "flk", 0.2, measure.at_most(1.0), "s")
    compare(f"connections kept {of} / all", "kept", "flk", 1.0, measure.at_least(1.0), "")
    growth = 1.5 * many / few
    for what, name, limit, unit in (
        ("start", "all_start", growth, "s"),
        ("restart", "restart", growth, "s"),
        ("leader's CPU time for a restart", "restart_cpu", growth, "s"),
        ("bytes that each pod gets at a start", "bytes", 1.2, "bytes"),
        ("memory", "memory", growth, "MiB"),
    ):
        compare(f"{what}, {many:,} launchers / {few:,}", name, "flk", "few", measure.at_most(limit), unit)
    # The store's server and clients are C++; flk's are Python, and compute a code for each message.
    for what, name, limit, unit in (
        ("start", "all_start", 1.0, "s"),
        ("restart", "restart", 10.0, "s"),
        ("memory", "memory", 3.0, "MiB"),
        ("descriptors", "descriptors", 1.05, "files"),
    ):
        compare(f"{what} of {many:,} launchers, flk / TCPStore", name, "flk", "TCPStore", measure.at_most(limit), unit)
    return made.finish()


def measure_flk(pods: int, *, profile: str = "") -> Figures:
    with leader("flk", pods, profile) as (port, usage):
        launchers, before, began = Launchers(pods, port), usage(), time.perf_counter()
        launchers.arrive(range(pods - 1))
        last = time.perf_counter()
        launchers.arrive(range(pods - 1, pods))
        launchers.wait_for(AttemptStarted)
        started, after_start = time.perf_counter(), usage()
        launchers.train(HOLD)
        held = usage()
        launchers.bytes.clear()
        failed = time.perf_counter()
        launchers.fail(1)
        launchers.wait_for(AttemptEnded)
        ended = time.perf_counter()
        launchers.join()
        launchers.wait_for(AttemptStarted)
        restarted, after = time.perf_counter(), usage()
        kept = (pods - launchers.lost) / pods
        size = sum(launchers.bytes[kind.__name__] for kind in (MemoryPlan, AttemptStarted)) / pods
        launchers.close()
    return Figures(
        started - began,
        started - last,
        after_start.cpu - before.cpu,
        ended - failed,
        restarted - failed,
        after.cpu - held.cpu,
        (held.cpu - after_start.cpu) / HOLD,
        kept,
        size,
        after.memory - before.memory,
        after.descriptors - before.descriptors,
    )


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
    growth, opened = after.memory - before.memory, after.descriptors - before.descriptors
    return Figures(start, 0.0, 0.0, 0.0, restart, 0.0, 0.0, 1.0, 0.0, growth, opened)


def new_store(port: int, *, serve: bool = False) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=serve, wait_for_workers=False)  # type: ignore[attr-defined]


# The leader's process ------------------------------------------------------------------------------------------------


def start_with_names() -> NoReturn:
    """Start this program anew, with a hosts file that has the names of both ends of the store's connections."""
    with tempfile.NamedTemporaryFile("w", delete=False) as hosts:
        hosts.write(f"{END} localhost\n127.0.0.1 localhost\n")
    mount = 'mount --bind "$0" /etc/hosts && rm "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, hosts.name, sys.executable, *sys.argv]
    os.execvpe(command[0], command, os.environ | {HAS_NAMES: "yes"})


@contextmanager
def leader(kind: str, launchers: int, profile: str = "") -> Iterator[tuple[int, Callable[[], Usage]]]:
    """A process that is the leader: its port, and a function that returns what it has used so far."""
    command = [sys.executable, __file__, "--serve", kind, "--launchers", str(launchers), "--profile", profile]
    with simulated_launchers.process(command) as started:
        yield started


if __name__ == "__main__":
    sys.exit(main())
