"""The names that a launcher gives its variables, and the RankInfo that their values make, checked for consistency.

Slurm tells hosts and tasks as compact lists: the hosts of a job (``a[1-3,07],b12``) and the tasks on each node
(``2(x3),1``). The syntax is that of `scontrol show hostnames` and of the variables of srun's manual page.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flk_runtime.errors import DiscoveryError

Environ = Mapping[str, str]

_NUMBER = re.compile(r"[0-9]{1,9}")
# Ports for launchers that give none: below Linux's ephemeral ports, away from torch's 29400 and 29500.
_FIRST_PORT, _PORTS = 15000, 10000


@dataclass(frozen=True)
class Launcher:
    """A launcher: the names of its variables (empty where it has none) and how they are read.

    It is recognised by the variable ``marker``, or by ``signs`` or the function ``recognise`` where that is not enough.
    """

    name: str
    marker: str
    read: Callable[[Launcher, Environ], RankInfo]
    rank: str = "RANK"
    local_rank: str = "LOCAL_RANK"
    world_size: str = "WORLD_SIZE"
    local_world_size: str = "LOCAL_WORLD_SIZE"
    node_rank: str = ""
    nodes: str = ""
    attempt: str = ""
    full_world_size: str = ""
    address: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"
    hosts: tuple[str, ...] = ()  # lists of hosts; the first host of a list runs rank 0
    # Variables that together identify one start and are the same on all its ranks: if no port is set, one is derived
    # from their values. None: address and port must both be set.
    start_id: tuple[str, ...] | None = None
    daemons: str = ""  # how many processes start its ranks: the one that was called, and one on each other node
    agent_store: bool = False  # whether it may host the ranks' store itself
    final: bool = False  # it sets its variables anew in each process, so variables of other launchers are ignored
    signs: tuple[tuple[frozenset[str], frozenset[str]], ...] = ()  # variables that are set while those others are not
    recognise: Callable[[Environ], bool] | None = None

    def is_present(self, environ: Environ) -> bool:
        """Whether this launcher has set its variables in ``environ``."""
        if self.signs:
            return any(present <= environ.keys() and absent.isdisjoint(environ) for present, absent in self.signs)
        return self.recognise(environ) if self.recognise else self.marker in environ


def number(environ: Environ, name: str, default: int | None = None) -> int:
    """The value of the variable ``name``; ``default`` if it is not set.

    Raises DiscoveryError for anything but a whole number of at most nine digits.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _NUMBER.fullmatch(text):
        raise DiscoveryError(f"{name}={text}: expected a whole number, 0 or more")
    return int(text)


def first_set(environ: Environ, *names: str) -> str:
    """The first of ``names`` that is set, else the last one."""
    return next((name for name in names if name in environ), names[-1])


def require(launcher: Launcher, environ: Environ, names: tuple[str, ...], setter: str, *more: str) -> None:
    """Raise DiscoveryError unless all ``names`` are set; ``setter`` says who sets them, ``more`` is shown as well."""
    missing = [name for name in names if name not in environ]
    if missing:
        raise DiscoveryError(
            f"{' and '.join(missing)} must be set together with {show(launcher, environ, *more)}: {setter} sets all of "
            "them"
        )


def show(launcher: Launcher, environ: Environ, *more: str) -> str:
    """``RANK=5, LOCAL_RANK=1, …``: the launcher's variables, and the variables in ``more``, that are set."""
    names = (launcher.marker, launcher.rank, launcher.local_rank, launcher.world_size, launcher.local_world_size, *more)
    return ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names) if name in environ)


def checked(
    launcher: Launcher,
    environ: Environ,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    node_rank: int | None,
    nodes: int | None,
) -> RankInfo:
    """The RankInfo with these numbers, checked against each other. Raises DiscoveryError with the first violation.

    ``node_rank`` and ``nodes`` are None where the launcher does not set them: then every node must have the same number
    of ranks, numbered node by node.
    """
    shown = show(launcher, environ)
    if world_size < 1 or rank >= world_size:
        raise DiscoveryError(f"{shown}: {launcher.rank} must be less than {launcher.world_size}")
    if nodes is not None and node_rank is not None and node_rank >= nodes:
        raise DiscoveryError(f"{shown}, {launcher.node_rank}={node_rank}: there are {nodes} nodes, numbered from 0")
    if local_world_size > world_size:
        raise DiscoveryError(f"{shown}: {launcher.local_world_size} must be at most {launcher.world_size}")
    if local_rank >= local_world_size:
        raise DiscoveryError(f"{shown}: {launcher.local_rank} must be less than {launcher.local_world_size}")
    if nodes is None or node_rank is None:
        node_rank, nodes = rank // local_world_size, world_size // local_world_size
        if world_size % local_world_size:
            raise DiscoveryError(
                f"{shown}: {launcher.world_size} is not a multiple of {launcher.local_world_size}; every node must "
                "have the same number of ranks"
            )
        if rank % local_world_size != local_rank:
            raise DiscoveryError(
                f"{shown}: {launcher.local_rank} must be {launcher.rank} % {launcher.local_world_size} = "
                f"{rank % local_world_size}, because ranks are numbered node by node: "
                "mpirun --map-by slot, or mpiexec -hosts a:4,b:4"
            )
    elif nodes == 1 and local_world_size < world_size:
        raise DiscoveryError(
            f"{shown}: on 1 node, {launcher.local_world_size} must be the same as {launcher.world_size}"
        )
    elif local_world_size + nodes - 1 > world_size:
        raise DiscoveryError(
            f"{shown}: {launcher.local_world_size} + {nodes - 1} (at least one rank on every other one of {nodes} "
            f"nodes) must be at most {launcher.world_size}"
        )
    return RankInfo(
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank=node_rank,
        launcher=launcher.name,
        master=_master(launcher, environ, nodes) if world_size > 1 else None,
        attempt=number(environ, launcher.attempt, default=0),
        full_world_size=number(environ, launcher.full_world_size, default=0),
        nodes=nodes,
        agent_store=launcher.agent_store and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _master(launcher: Launcher, environ: Environ, nodes: int) -> tuple[str, int] | None:
    """Host and port of the store; None where Horovod's ranks have to ask each other."""
    shown = show(launcher, environ)
    start_id = "/".join(environ[name] for name in launcher.start_id or () if name in environ)
    address, port = environ.get(launcher.address), environ.get(launcher.port)
    if address is None and launcher.start_id is not None:
        hosts = first_set(environ, *launcher.hosts) if launcher.hosts else ""
        if nodes == 1:
            address = "127.0.0.1"
        elif hosts in environ:  # srun's, after `read_slurm`
            address = first_host(hosts, environ[hosts])
        elif launcher.name == "horovod" and port is None:
            return None
    if address is None:
        raise DiscoveryError(
            f"{launcher.address} must be set together with {shown}: all ranks connect to rank 0 at that address"
        )
    if port is None and start_id:
        return address, _FIRST_PORT + zlib.crc32(start_id.encode()) % _PORTS
    if port is None:
        raise DiscoveryError(
            f"{launcher.port} must be set together with {shown}: all ranks connect to rank 0 at that port"
        )
    if not 0 < (value := number(environ, launcher.port)) < 1 << 16:
        raise DiscoveryError(f"{launcher.port}={port} is not a port: expected 1 to 65535")
    return address, value


@dataclass(frozen=True)
class RankInfo:
    """The identity of one process of a job.

    ``rank`` is in [0, world_size), ``local_rank`` in [0, local_world_size), ``node_rank`` in [0, nodes).
    ``local_world_size`` is this node's; nodes may differ where the launcher describes each of them (Slurm, torchrun).
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "alone"  # flk, torchrun, horovod, slurm, openmpi, mpich, pytorchjob, trainer, env, script, alone
    # Host and port of the store. None if world_size is 1, and where only Horovod's communicator can tell it.
    master: tuple[str, int] | None = None
    attempt: int = 0  # number of earlier starts of this job's ranks
    nodes: int = 1
    full_world_size: int = 0  # of an elastic job when all its pods are there; 0: the launcher does not tell
    agent_store: bool = False  # the launcher hosts the store at ``master``, so rank 0 does not


# Lists of Slurm -------------------------------------------------------------------------------------------------

# A name may have several brackets with numbers and ranges of them; the first number of each makes the first host.
_BRACKET = re.compile(r"\[([0-9]+)[0-9,-]*\]")
_FIRST_HOST = re.compile(rf"((?:[^\[\],\s]|{_BRACKET.pattern.replace('(', '(?:')})+)(?:,|\Z)")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def first_host(name: str, text: str) -> str:
    """The first host of a list such as ``a[1-3,07]-ib,b12``, the value of the variable ``name``.

    Raises DiscoveryError if ``text`` does not begin with a host.
    """
    match = _FIRST_HOST.match(text)
    if not match:
        raise DiscoveryError(f"{name}={text} is not a list of hosts: expected names like a[1-3,07],b12")
    return _BRACKET.sub(lambda bracket: bracket[1], match[1])


def tasks_of(name: str, text: str, node: int) -> tuple[int, int, int]:
    """(tasks of the node with number ``node``, number of nodes, sum of all tasks) of a list of tasks per node.

    The first is 0 if the list, the value of the variable ``name``, has no such node. Raises DiscoveryError if ``text``
    is not such a list.
    """
    own = nodes = total = 0
    for item in text.split(","):
        match = _TASKS.fullmatch(item)
        if not match:
            raise DiscoveryError(f"{name}={text}: {item!r} is not a number of tasks: expected 2, or 2(x3) on 3 nodes")
        tasks, repeated = int(match[1]), int(match[2] or 1)
        if nodes <= node < nodes + repeated:
            own = tasks
        nodes += repeated
        total += tasks * repeated
    return own, nodes, total
