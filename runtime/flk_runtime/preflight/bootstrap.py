"""Where the ranks of an attempt find each other: one store that all of them reach, and keys that nobody used before.

torch's own TCPStore waits without a word where the master's name does not resolve, where a firewall drops packets, or
where something else listens at its port. Here each step is tried by itself, and the one that fails is named.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from flk_runtime.discovery import RankInfo, discover
from flk_runtime.errors import DiscoveryError, RendezvousError, SetupError
from flk_runtime.preflight import report as facts
from flk_runtime.system import host

_LOOK = 3.0  # seconds for one look at the master's port
_RETRY_PORT = 3.0  # seconds that a port in use may take to become free: an earlier attempt's rank 0 may be ending
_POLL_MIN = 0.002  # seconds between two looks into the store, doubled up to _POLL_MAX
_POLL_MAX = 0.05
_ROSTER = "flk/roster"  # in a store that several attempts share: who came, with a word to call him by

_meetings = itertools.count()  # of this process; ranks meet equally often, so this number is theirs together


def connect_store(place: RankInfo, timeout: float) -> Any:
    """The store of this attempt's ranks, as torch's Store. Keys in it are of this meeting only.

    Rank 0 opens the store, unless the launcher has. Waits ``timeout`` seconds. Raises RendezvousError that says
    why the master was not reached, and SetupError where rank 0 cannot be the master. Collective.
    """
    deadline = time.monotonic() + timeout
    number = next(_meetings)
    if place.master is None:
        store, master = _agree(place, deadline)
    else:
        master = place.master
        if place.rank == 0 and not place.agent_store:
            store = _open(place, *master, deadline)
        else:
            store = connect(place, *master, deadline)
    # Only flk's launcher gives each attempt a store of its own; torchrun's outlives its ranks.
    shared = place.agent_store and place.launcher != "flk"
    prefix = _attempt(store, place, master, deadline) if shared else f"flk/{number}"
    return distributed_c10d.PrefixStore(prefix, store)


def connect(place: RankInfo, address: str, port: int, deadline: float) -> Any:
    """A client of the store at this address. Raises RendezvousError at the deadline, with the last failure."""
    pause = _POLL_MAX
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(_LOOK, left))).close()
            return _client(address, port, max(0.1, deadline - time.monotonic()))
        except (OSError, RuntimeError) as error:
            if deadline - time.monotonic() <= pause:
                raise RendezvousError(_unreached(place, address, port, error)) from error
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)


def _client(address: str, port: int, patience: float, *, serve: bool = False) -> Any:
    """torch's store, or TimeoutError: its constructor waits for ever where the other end accepts and says nothing."""
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def construct() -> None:
        try:
            limit = timedelta(seconds=max(1.0, patience))
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, is_master=serve, timeout=limit, wait_for_workers=False, multi_tenant=serve
            )
        except BaseException as error:
            answer.put(error)
        else:
            answer.put(store)

    threading.Thread(target=construct, name="store", daemon=True).start()
    try:
        made = answer.get(timeout=patience)
    except queue.Empty:
        raise SilenceError from None
    if isinstance(made, BaseException):
        raise made
    return made


class SilenceError(OSError):
    """Something accepted the connection and did not answer as a store does."""


def _unreached(place: RankInfo, address: str, port: int, error: Exception) -> str:
    me = f"rank {place.rank} on node {facts.node_name()} did not reach the master {address}:{port}"
    if isinstance(error, socket.gaierror):
        return (
            f"{me}: the name {address} does not resolve there ({error.strerror}); check MASTER_ADDR, or give the "
            "address of rank 0's node instead of its name"
        )
    if isinstance(error, ConnectionRefusedError):
        if place.nodes > 1 and _is_loopback(address):
            return (
                f"{me}: {address} is the node itself, wherever it is used, and nothing listens at port {port} there "
                "(connection refused); set MASTER_ADDR to an address of rank 0's node that the other nodes reach"
            )
        return (
            f"{me}: the host is there, but nothing listens at port {port} (connection refused); check that rank 0 runs "
            "on that host and has not ended, and that MASTER_ADDR and MASTER_PORT are the same everywhere"
        )
    if isinstance(error, SilenceError):
        return (
            f"{me}: something accepts connections there, but it does not answer as rank 0's store does; another "
            "program uses the port: choose another MASTER_PORT"
        )
    if isinstance(error, TimeoutError):
        return (
            f"{me}: no answer; the address is wrong, or a firewall between the nodes drops what goes to port {port}: "
            "check MASTER_ADDR, and open the port"
        )
    if isinstance(error, OSError):
        return f"{me}: there is no route to it ({error.strerror or error}); check MASTER_ADDR and the nodes' network"
    return f"{me}: {str(error).splitlines()[0]}; another program may use the port: choose another MASTER_PORT"


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(OSError):
        return all(str(found[4][0]).startswith(("127.", "::1")) for found in socket.getaddrinfo(address, None))
    return False


def _open(place: RankInfo, address: str, port: int, deadline: float) -> Any:
    """Rank 0's part: the store itself, once it is sure that the others will find it under the master's name."""
    give_up = min(deadline, time.monotonic() + _RETRY_PORT)
    while not host.is_port_free(port):
        holder = host.listening_process(port)
        if holder == os.getpid():  # a group that this process had before; torch lets both use the server
            break
        if holder is not None and _is_rank_0(holder, address, port):
            return connect(place, address, port, deadline)  # a second rank 0: the ranks will see it together
        if time.monotonic() >= give_up:
            name = f"{_command(holder)} (process {holder})" if holder else "a process that is not ours to see"
            raise SetupError(
                f"rank 0 on node {facts.node_name()} cannot open the store at port {port}: {name} listens there; end "
                "it, or choose another MASTER_PORT"
            )
        time.sleep(_POLL_MAX)
    own = _resolve(place, address, port, deadline)
    try:
        store = _client(address if own else "localhost", port, max(1.0, deadline - time.monotonic()), serve=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise SetupError(
            f"rank 0 on node {facts.node_name()} cannot open the store at port {port}: {reason}; choose another "
            "MASTER_PORT"
        ) from error
    if own:
        return store
    reached = _through(place, address, port, deadline)
    if reached is None:
        raise SetupError(
            f"rank 0 runs on node {facts.node_name()}, but the master's address {address} is not that node's: set "
            f"MASTER_ADDR to rank 0's node ({own_address()}), or start rank 0 on {address}"
        )
    word = f"flk/{uuid.uuid4().hex}"
    store.set(word, "")
    # Through a service's address it is this very store; else there is another rank 0, and the ranks will see both.
    return store if reached.check([word]) else reached


def _resolve(place: RankInfo, address: str, port: int, deadline: float) -> bool:
    """Whether the master's name means this node. Waits while the name does not resolve yet."""
    while True:
        try:
            return any(host.is_local_address(str(found[4][0])) for found in socket.getaddrinfo(address, port))
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(_unreached(place, address, port, error)) from error
        time.sleep(_POLL_MAX)


def _through(place: RankInfo, address: str, port: int, deadline: float) -> Any:
    """A client of the store that others find under the master's name, or None where they find none."""
    try:
        return connect(place, address, port, min(deadline, time.monotonic() + _LOOK))
    except RendezvousError:
        return None


def own_address() -> str:
    """An address of this node that others may reach: towards the default route, else what its name means."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.1", 9))  # kept for documentation (RFC 5737); nothing is sent
        return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _command(process: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return f"`{b' '.join(words).decode(errors='replace')[:80]}`"
    return "a process"


def _is_rank_0(process: int, address: str, port: int) -> bool:
    """Whether that process was started as rank 0 of the same master: there are two, or an earlier run goes on."""
    try:
        pairs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        other = discover(dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs if b"=" in pair))
    except (OSError, DiscoveryError):
        return False
    return other.rank == 0 and other.master == (address, port)


def _attempt(store: Any, place: RankInfo, master: tuple[str, int], deadline: float) -> str:
    """A prefix for this attempt's keys in a store that outlives attempts, as torchrun's does.

    Nothing in the environment numbers the attempts: TORCHELASTIC_RESTART_COUNT is each agent's own. So rank 0 makes a
    name up and hands it to those who are there: each comes with a word of its own, and is answered by that word. What
    dead ranks left behind answers nobody.
    """
    word = uuid.uuid4().hex
    if place.rank != 0:
        store.append(_ROSTER, f"{place.rank} {word}\n")
        try:
            store.wait([f"flk/call/{word}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError:
            raise RendezvousError(
                f"rank 0 did not answer rank {place.rank} on node {facts.node_name()} in the launcher's store at "
                f"{master[0]}:{master[1]}: it did not come, or another process has come as rank {place.rank}"
            ) from None
        prefix: str = store.get(f"flk/call/{word}").decode()
        store.add(f"{prefix}/answered", 1)
        return prefix
    prefix = f"flk/{word}"
    called: set[str] = set()
    pause = _POLL_MIN
    while store.add(f"{prefix}/answered", 0) < place.world_size - 1 and time.monotonic() < deadline:
        lines = store.get(_ROSTER).decode().splitlines() if store.check([_ROSTER]) else []
        words = [line.partition(" ")[2] for line in lines if int(line.partition(" ")[0]) < place.world_size]
        new = [word for word in words if word not in called]
        if new:
            store.multi_set([f"flk/call/{word}" for word in new], [prefix] * len(new))
            called.update(new)
            pause = _POLL_MIN
        time.sleep(pause)
        pause = min(_POLL_MAX, pause * 2)
    return prefix


def _agree(place: RankInfo, deadline: float) -> tuple[Any, tuple[str, int]]:
    """The store of a launcher that names no master: rank 0 tells the others by the launcher's own communicator."""
    tell = _horovod if place.launcher == "horovod" else _mpi
    store, master = None, ("", 0)
    if place.rank == 0:
        store = _client("localhost", 0, _LOOK, serve=True)
        master = (own_address() if place.nodes > 1 else "127.0.0.1", int(store.port))
    master = tell(place, master)
    if store is None:
        store = connect(place, *master, deadline)
    return store, master


def _horovod(place: RankInfo, master: tuple[str, int]) -> tuple[str, int]:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise SetupError(
            f"Horovod's variables are set, but horovod.torch cannot be imported ({error}): install it, or set "
            "MASTER_ADDR and MASTER_PORT"
        ) from error
    hvd.init()
    if (hvd.rank(), hvd.size()) != (place.rank, place.world_size):
        raise SetupError(
            f"Horovod says rank {hvd.rank()} of {hvd.size()}, its variables say {place.rank} of {place.world_size}"
        )
    told: tuple[str, int] = hvd.broadcast_object(master, root_rank=0)
    return told


def _mpi(place: RankInfo, master: tuple[str, int]) -> tuple[str, int]:
    try:
        from mpi4py import MPI
    except ImportError:
        option = "mpirun -x MASTER_ADDR=…" if place.launcher == "openmpi" else "mpiexec -genv MASTER_ADDR …"
        raise SetupError(
            f"{place.launcher} started {place.world_size} ranks and names no master: set MASTER_ADDR to the host of "
            f"rank 0 ({option}) and MASTER_PORT to a free port there, or install mpi4py"
        ) from None
    if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (place.rank, place.world_size):
        raise SetupError(
            f"mpi4py says rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}, the variables of {place.launcher} say "
            f"{place.rank} of {place.world_size}: mpi4py was built with another MPI than the one that started this"
        )
    told: tuple[str, int] = MPI.COMM_WORLD.bcast(master, root=0)
    return told
