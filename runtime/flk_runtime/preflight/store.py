"""Opens the store on rank 0 and connects the other ranks to it, with an error that names the step that failed.

torch's TCPStore waits without any message where the master's name does not resolve, where a firewall drops packets, or
where another program listens at its port. Here each step is tried on its own.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flk_runtime.discovery import RankInfo
from flk_runtime.errors import RendezvousError, SetupError
from flk_runtime.preflight.exchange import Waiting
from flk_runtime.preflight.report import node_name
from flk_runtime.system import host

_ATTEMPT = 3.0  # seconds for one attempt to connect to the master's port
_OWN_STORE = 10.0  # seconds in which rank 0 reaches its own store, once the master's name resolves
_RETRY_PORT = 3.0  # seconds that a port in use may take to become free: an earlier attempt's rank 0 may be ending
_POLL = 0.05  # seconds


class _NotAStoreError(OSError):
    """Something accepted the connection and did not answer as a TCPStore does."""


def connect(info: RankInfo, address: str, port: int, deadline: float) -> Any:
    """A client of the store at this address. Raises RendezvousError at the deadline, with the last failure.

    The first rank of each node prints a line when it has waited for 10 seconds.
    """
    interval = _POLL
    waiting = Waiting(deadline) if info.local_rank == 0 else None
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(_ATTEMPT, left))).close()
            return _tcp_store(address, port, max(0.1, deadline - time.monotonic()))
        except (OSError, RuntimeError) as error:
            if deadline - time.monotonic() <= interval:
                raise RendezvousError(_connection_error(info, address, port, error)) from error
            if waiting and waiting.is_due():
                waiting.say(_connection_error(info, address, port, error))
        time.sleep(interval)
        interval = min(1.0, interval * 1.5)


def serve(deadline: float) -> Any:
    """A new store at any free port of this node."""
    return _tcp_store("localhost", 0, max(1.0, deadline - time.monotonic()), serve=True)


def own_address() -> str:
    """An address of this node for other nodes: the default route's source, else the host name's address."""
    for outside in ("203.0.113.1", "2001:db8::1"):  # reserved for documentation (RFC 5737, RFC 3849); nothing is sent
        source = host.source_address(outside)
        if source:
            return source
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return "127.0.0.1"


def open_store(info: RankInfo, address: str, port: int, deadline: float) -> Any:
    """Serve the store on rank 0, which connects to it as the other ranks do: they must find it at ``address``.

    Raises SetupError where the port is in use or the address is another node's, and RendezvousError where its name does
    not resolve.
    """
    retry_until = min(deadline, time.monotonic() + _RETRY_PORT)
    server: Any = None
    while server is None:
        try:
            server = _tcp_store("localhost", port, max(1.0, deadline - time.monotonic()), serve=True)
        except RuntimeError as error:
            if time.monotonic() >= retry_until:
                raise SetupError(
                    f"rank 0 on node {node_name()} cannot open the store at port {port} "
                    f"({str(error).splitlines()[0]}): end what listens there or choose another MASTER_PORT, or give "
                    "this process a rank of its own if another one is rank 0"
                ) from error
            time.sleep(_POLL)
    try:
        client = connect(info, address, port, min(deadline, time.monotonic() + _OWN_STORE))
    except RendezvousError as error:
        if not isinstance(error.__cause__, socket.gaierror):
            raise SetupError(
                f"rank 0 runs on node {node_name()}, and does not reach its own store at the master's address "
                f"{address}:{port} ({error.__cause__}): set MASTER_ADDR to an address of rank 0's node, such as "
                f"{own_address()}, or start rank 0 on {address}"
            ) from error
        client = connect(info, address, port, deadline)  # the name of a new pod is not known at once
    nonce = f"flk/{uuid.uuid4().hex}"
    server.add(nonce, 1)  # unlike set, it returns when the store has it
    # The address may lead to another rank 0: join that one, and the preflight will report both.
    return server if client.check([nonce]) else client


def _tcp_store(address: str, port: int, timeout: float, *, serve: bool = False) -> Any:
    """torch's TCPStore. Raises _NotAStoreError after ``timeout`` seconds.

    The constructor runs in a thread: it waits for ever where the other end accepts the connection and sends nothing.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def construct() -> None:
        try:
            limit = timedelta(seconds=max(1.0, timeout))
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, is_master=serve, timeout=limit, wait_for_workers=False, multi_tenant=serve
            )
        except BaseException as error:
            results.put(error)
        else:
            results.put(store)

    threading.Thread(target=construct, name="store", daemon=True).start()
    try:
        result = results.get(timeout=timeout)
    except queue.Empty:
        raise _NotAStoreError("what accepts connections there does not answer as rank 0's store does") from None
    if isinstance(result, BaseException):
        raise result
    return result


# What a failure to connect means, and what to do: the first class that it is of.
_CAUSES: tuple[tuple[type[Exception], str], ...] = (
    (
        socket.gaierror,
        "the name does not resolve there: check MASTER_ADDR, or set it to the IP address of rank 0's node",
    ),
    (
        ConnectionRefusedError,
        "nothing listens there: check that rank 0 runs on that host and has not ended, and that MASTER_ADDR and "
        "MASTER_PORT are the same on all ranks; localhost and 127.0.0.1 are each node's own",
    ),
    (_NotAStoreError, "another program uses the port: choose another MASTER_PORT"),
    (OSError, "check that MASTER_ADDR is an address of rank 0's node, and that the network lets the port through"),
    (RuntimeError, "another program may use the port: choose another MASTER_PORT"),
)


def _connection_error(info: RankInfo, address: str, port: int, error: Exception) -> str:
    """One sentence that says what failed, why, and what to do."""
    cause = next(text for kind, text in _CAUSES if isinstance(error, kind))
    return (
        f"rank {info.rank} on node {node_name()} did not reach the master {address}:{port} "
        f"({str(error).splitlines()[0]}): {cause}"
    )
