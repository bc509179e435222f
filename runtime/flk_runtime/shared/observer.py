"""Observer of a rank: lets the launcher see the rank's Python stacks, and the collectives that it waits in.

The observer does this in two ways, because each works where the other cannot:

- A signal makes faulthandler write the stacks of all threads into a file. It needs neither Python's lock (GIL) nor an
  import, so it works while native code holds the GIL and while imports wait for each other.
- A thread answers on a Unix socket with what torch's flight recorder knows: the number of the latest collective of
  each process group, and the collectives that have not ended. A few times a second it also notes whether a collective
  is pending, which says how much of its time a rank waits for the others. And it executes programs that it is sent.

The launcher passes the path of both in FLK_OBSERVER.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flk_runtime.contract import pod_env, pod_layout
from flk_runtime.shared.progress import Phase, ProgressPage, own_page
from flk_runtime.system import torch_private
from flk_runtime.wire import Registry, accept

STACKS: Final = ".stacks"  # suffixes of FLK_OBSERVER: the file of the stacks,
SOCKET: Final = ".socket"  # and the socket
_SAMPLE_SECONDS: Final = (0.05, 0.15)  # between two samples; random, so that they do not follow the rhythm of the steps
_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)  # of the thread itself
_PENDING_LIMIT: Final = 20  # collectives in an answer
_OTHERS: Final = "_dump_fr_trace_json"  # functions of torch: what the recorders of gloo and others have,
_NCCL: Final = "_dump_nccl_trace_json"  # and NCCL's


def is_default(group: str) -> bool:
    """Return whether a group, as in `Pending`, is a backend's part of the default group."""
    return group.endswith(":0")


@dataclass(frozen=True)
class Pending:
    """A collective that a rank has begun and that has not ended, by torch's flight recorder."""

    group: str  # backend and name of the process group: nccl:0
    number: int  # of the collective in its group, from 1
    name: str  # all_reduce, broadcast, …
    sizes: str = ""  # of its tensors

    def __str__(self) -> str:
        return f"{self.name} {self.number}" + ("" if is_default(self.group) else f" of group {self.group}")


@dataclass(frozen=True)
class Collectives:
    """A rank's collectives, by torch's flight recorders: the observer's answer to an empty request.

    The name of a group begins with its backend: the CPU and the GPUs count the collectives of a group apart. Empty
    without process groups, and with a torch that records nothing.
    """

    groups: Mapping[str, int]  # number of the latest collective of each group
    pending: tuple[Pending, ...]


ANSWERS: Final[Registry[Collectives]] = Registry([Collectives])


def stack_signal() -> int:
    """The signal that makes a rank write its stacks: a real-time signal, which scripts do not use for other things."""
    return signal.SIGRTMIN + 10


def start() -> None:
    """Start to observe this process, if the launcher has asked for it. Errors are ignored: a rank runs without it."""
    path = os.environ.get(pod_env.OBSERVER)
    if not path:
        return
    others = signal.valid_signals() - set(_FAULTS)
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if pod_layout.LINUX:  # elsewhere there is no such signal, and the socket tells the stacks of Python
            # The descriptor stays open until the process ends. Processes that are forked from this one write there too.
            stacks = os.open(path + STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            faulthandler.register(stack_signal(), file=stacks, all_threads=True)
            others -= {stack_signal()}
        listener = socket.socket(socket.AF_UNIX)
        with short_path(path + SOCKET) as short:
            listener.bind(short)
        listener.listen()
        # A script may wait for signals that it blocks: another thread must not take them from it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, others)
        try:
            threading.Thread(target=_serve, args=(listener, own_page()), name="flk-observer", daemon=True).start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Another path of the same file that is short enough for a Unix socket, whose path has at most 107 bytes.

    Without /proc it is the path itself.
    """
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}" if pod_layout.LINUX else path
    finally:
        os.close(folder)


def _serve(listener: socket.socket, page: ProgressPage) -> None:
    status: dict[str, Any] = {}
    while True:
        try:
            # Not by the script's generator, whose numbers would depend on when this thread draws.
            listener.settimeout(random.SystemRandom().uniform(*_SAMPLE_SECONDS))
            accepted = accept(listener)
        except OSError:  # the script has closed the descriptor
            return
        with contextlib.suppress(Exception):  # such as another form of what torch records
            if accepted is None:
                status = _sample(page, status)
            else:
                connection, _ = accepted
                connection.settimeout(5)
                _answer(connection, page)


def _answer(connection: socket.socket, page: ProgressPage) -> None:
    """Answer a request, which is a line: an empty one asks for the collectives, another one has a program as JSON.

    The program gets a thread, and the connection: `flk profile` sends one (`flk_runtime.profiling`). Only processes of
    the rank's own user, who may do anything with it, can open the socket.
    """
    with connection.makefile("rb") as file:
        request = json.loads(file.readline().strip() or b"{}")
    if "source" in request:
        threading.Thread(target=_run, args=(connection, page, request), name="flk-program", daemon=True).start()
        return
    with connection:
        connection.sendall(ANSWERS.encode(collectives()))


def _run(connection: socket.socket, page: ProgressPage, request: dict[str, Any]) -> None:
    names: dict[str, Any] = {"__name__": "flk_program"}
    with connection, contextlib.suppress(Exception):
        exec(request["source"], names)  # noqa: S102 - see _answer
        names["serve"](connection, page, request["arguments"])


def _sample(page: ProgressPage, before: dict[str, Any]) -> dict[str, Any]:
    """Note in the page whether a collective is pending, and whether one has begun or ended since ``before``.

    ``before`` is what the previous call returned: the numbers of the latest collectives of each recorder's groups.
    """
    status = {name: found for name, trace in _traces(entries=False).items() if (found := trace.get("pg_status"))}
    if not status:
        return status
    if status != before:
        page.collective_time = time.monotonic()
    if page.phase == Phase.MEETING:  # rank 0 waits for other workers, outside of collectives
        return status
    groups = [(name, each) for name, found in status.items() for each in found.values()]
    page.pending = any(_goes_on(each, "enqueued") for _, each in groups)
    # A script queues collectives of NCCL long before they begin on the device.
    begun = [(each, "started" if name == _NCCL else "enqueued") for name, each in groups]
    page.untold = any(int(each[f"last_{what}_collective"]) < 0 for each, what in begun)
    if not page.untold:
        page.samples += 1
        page.pending_samples += any(_goes_on(each, what) for each, what in begun)
    return status


def _goes_on(group: dict[str, str], what: str) -> bool:
    """Return whether the latest collective of a group that was enqueued, or started, has not ended."""
    return int(group[f"last_{what}_collective"]) > max(0, int(group["last_completed_collective"]))


def collectives() -> Collectives:
    """What torch's flight recorders know of this process."""
    groups: dict[str, int] = {}
    pending: dict[tuple[str, int, str], Pending] = {}
    entries = [entry for trace in _traces(entries=True).values() for entry in trace.get("entries", [])]
    for entry in sorted(entries, key=lambda each: int(each["time_created_ns"])):
        backend, _, name = str(entry["profiling_name"]).rpartition(":")
        group, number = f"{backend}:{entry['process_group'][0]}", int(entry["collective_seq_id"])
        if entry["is_p2p"]:  # counted apart, and ranks differ in them
            group, number = f"{group} (p2p)", int(entry["p2p_seq_id"])
        else:
            groups[group] = max(number, groups.get(group, 0))
        if not entry["retired"] and entry["state"] != "completed":
            pending[group, number, name] = Pending(group, number, name, str(entry["input_sizes"])[:100])
    return Collectives(groups, tuple(pending.values())[:_PENDING_LIMIT])


def _traces(*, entries: bool) -> dict[str, dict[str, Any]]:
    """The traces of torch's flight recorders, by the function that tells each; empty while torch is not imported.

    NCCL has a recorder of its own, and torch before 2.8 has no other one as JSON.
    """
    traces = {}
    for name in (_OTHERS, _NCCL):
        recorder = torch_private.flight_recorder(name)
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            trace = json.loads(recorder(entries, False)) if recorder else None
            if isinstance(trace, dict):
                traces[name] = trace
    return traces
