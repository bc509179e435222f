"""Who am I? The place of this process in its job, out of the variables that its launcher has set.

A pure function of the environment: nothing is connected to, nothing imported. Each launcher is one row of the table
LAUNCHERS; docs/launchers.md is the same table in words. Where several launchers have left variables (mpirun inside a
Slurm job, say), they must agree, or one must have been started inside the other; anything else is an error.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flk_runtime import contract
from flk_runtime.discovery import slurm as hostlist
from flk_runtime.errors import DiscoveryError

Environ = Mapping[str, str]

_NUMBER = re.compile(r"[0-9]{1,9}")
_LAUNCH = "start the script with `torchrun script.py` or `python -m flk_runtime script.py`"
# Ports for launchers that give none: below Linux's ephemeral ports, away from torch's 29400 and 29500.
_FIRST_PORT, _PORTS = 15000, 10000
# What Slurm calls the steps that run a job's script or an interactive shell: no srun has started those (slurm.h).
_SHELLS = frozenset({"4294967290", "4294967291"})


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands: rank in [0, world_size), and local_rank in [0, local_world_size) on its node.

    ``local_world_size`` is this node's; nodes may differ where the launcher describes each of them (Slurm, torchrun).
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "alone"  # flk, torchrun, horovod, slurm, openmpi, mpich, pytorchjob, trainer, env, alone
    # Host and port where the ranks meet. None in a world of one, and where only the launcher's communicator can tell.
    master: tuple[str, int] | None = None
    attempt: int = 0  # how often this job's ranks have been started before
    nodes: int = 1
    agent_store: bool = False  # the launcher holds the store at ``master``, so that no rank opens one there


def _read(launcher: Launcher, environ: Environ) -> RankInfo:
    """The place that four numbers describe, and the nodes' numbers where the launcher gives them."""
    names = (launcher.rank, launcher.local_rank, launcher.world_size, launcher.local_world_size)
    shown = _show(launcher, environ)
    if environ.get(launcher.world_size) == "1":  # which leaves nothing open
        environ = {launcher.rank: "0", launcher.local_rank: "0", launcher.local_world_size: "1", **environ}
    missing = [name for name in names if name not in environ]
    if missing:
        raise DiscoveryError(f"{' and '.join(missing)} must be set beside {shown}: a launcher sets all of them")
    rank, local_rank, world_size, local_world_size = (_number(environ, name) for name in names)
    node_rank = nodes = None
    if launcher.nodes in environ and launcher.node_rank in environ:
        node_rank, nodes = _number(environ, launcher.node_rank), _number(environ, launcher.nodes)
    return _place(launcher, environ, rank, local_rank, world_size, local_world_size, node_rank, nodes)


def _read_torchrun(launcher: Launcher, environ: Environ) -> RankInfo:
    """With --virtual-local-rank each worker sees one GPU and LOCAL_RANK is 0; the ranks of a node still follow on."""
    place = _read(launcher, environ)
    position = place.rank - place.node_rank * place.local_world_size
    even = place.world_size == place.nodes * place.local_world_size
    if place.local_rank == 0 and even and 0 <= position < place.local_world_size:
        return replace(place, local_rank=position)
    return place


def _read_slurm(launcher: Launcher, environ: Environ) -> RankInfo:
    """A task of a step of srun; nodes may have different numbers of tasks, and ranks may go round the nodes."""
    tasks = _first(environ, "SLURM_STEP_TASKS_PER_NODE", launcher.local_world_size)
    launcher = replace(
        launcher, world_size=_first(environ, "SLURM_STEP_NUM_TASKS", launcher.world_size), local_world_size=tasks
    )
    names = (launcher.rank, launcher.local_rank, launcher.world_size, launcher.node_rank)
    missing = [name for name in (*names, tasks) if name not in environ]
    if missing:
        raise DiscoveryError(
            f"{' and '.join(missing)} must be set beside {_show(launcher, environ)}: srun sets all of them"
        )
    rank, local_rank, world_size, node_rank = (_number(environ, name) for name in names)
    try:
        local_world_size, nodes, total = hostlist.tasks_of(environ[tasks], node_rank)
    except ValueError as error:
        raise DiscoveryError(f"{tasks}={environ[tasks]}: {error}") from None
    if total != world_size:
        raise DiscoveryError(f"{tasks}={environ[tasks]} lists {total} tasks, but {launcher.world_size}={world_size}")
    return _place(launcher, environ, rank, local_rank, world_size, local_world_size, node_rank, nodes)


def _read_pod(launcher: Launcher, environ: Environ) -> RankInfo:
    """A pod whose script is started directly: its number is the rank only where it has one process."""
    shown = _show(launcher, environ, "PET_NNODES", "PET_NPROC_PER_NODE")
    names = (launcher.rank, launcher.world_size, launcher.nodes)
    missing = [name for name in names if name not in environ]
    if missing:
        raise DiscoveryError(f"{' and '.join(missing)} must be set beside {shown}: the operator sets all of them")
    if ":" in environ[launcher.nodes]:
        raise DiscoveryError(
            f"{shown} are an elastic job's, whose launchers agree on the ranks, and none started this process: "
            f"{_LAUNCH}"
        )
    pod, pods, world_size = (
        _number(environ, name) for name in (launcher.node_rank, launcher.nodes, launcher.world_size)
    )
    processes = environ.get("PET_NPROC_PER_NODE", "auto")
    # "auto" is left to the launcher to count. A PyTorchJob counts it as one process, so its WORLD_SIZE shows that; and
    # the only process of the only pod keeps nobody waiting.
    one = processes == "1" or (processes == "auto" and (launcher.name == "pytorchjob" or pods == 1))
    if not one or world_size != pods or _number(environ, launcher.rank) != pod:
        raise DiscoveryError(
            f"{shown} are an operator's: {launcher.rank} is the number of the pod, not of the process, and no launcher "
            f"started this process: {_LAUNCH}, or let the job have one process per pod (nprocPerNode: 1)"
        )
    return _place(launcher, environ, pod, 0, pods, 1, pod, pods)


def _started_by_srun(environ: Environ) -> bool:
    return "SLURM_STEP_ID" in environ and environ["SLURM_STEP_ID"] not in _SHELLS


def _set_by_hand(environ: Environ) -> bool:
    return "LOCAL_RANK" in environ or (
        "PET_NODE_RANK" not in environ and ("RANK" in environ or "WORLD_SIZE" in environ)
    )


def _in_pytorchjob(environ: Environ) -> bool:
    return "PET_NODE_RANK" in environ and "RANK" in environ and "LOCAL_RANK" not in environ


def _in_trainjob(environ: Environ) -> bool:
    return "PET_NODE_RANK" in environ and "RANK" not in environ and "LOCAL_RANK" not in environ


@dataclass(frozen=True)
class Launcher:
    """The names that a launcher gives its variables; none for a number that is always the same.

    It is recognised by ``mark``, or by what ``seen`` looks for.
    """

    name: str
    mark: str
    rank: str = "RANK"
    local_rank: str = "LOCAL_RANK"
    world_size: str = "WORLD_SIZE"
    local_world_size: str = "LOCAL_WORLD_SIZE"
    node_rank: str = ""
    nodes: str = ""
    attempt: str = ""
    address: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"
    hosts: tuple[str, ...] = ()  # a list of hosts, the first of which is rank 0's
    # Variables that together name one start, the same for all its ranks: a port is derived from them where none is set.
    start: tuple[str, ...] | None = None  # None: address and port must both be set
    agent_store: bool = False  # whether it may hold the ranks' store itself
    final: bool = False  # it sets its variables anew in each process, so nobody else's count beside them
    seen: Callable[[Environ], bool] | None = None
    read: Callable[[Launcher, Environ], RankInfo] = _read

    def is_seen(self, environ: Environ) -> bool:
        """Whether this launcher has left its variables in ``environ``."""
        return self.seen(environ) if self.seen else self.mark in environ


# From the innermost to the outermost: what is started inside of what. flk's launcher sets torchrun's variables too.
LAUNCHERS = (
    Launcher(
        "flk", contract.ATTEMPT, node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE", attempt=contract.ATTEMPT,
        agent_store=True, final=True,
    ),
    Launcher(
        "torchrun", "TORCHELASTIC_RUN_ID", node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE",
        attempt="TORCHELASTIC_RESTART_COUNT", agent_store=True, final=True, read=_read_torchrun,
    ),
    Launcher(  # by hand, or by a launcher like torchrun
        "env", "LOCAL_RANK", node_rank="GROUP_RANK", nodes="GROUP_WORLD_SIZE", attempt="TORCHELASTIC_RESTART_COUNT",
        agent_store=True, seen=_set_by_hand,
    ),
    Launcher(
        "horovod", "HOROVOD_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE",
        start=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    Launcher(
        "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", start=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(  # MVAPICH2
        "mpich", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE", start=("PMI_JOBID",),
    ),
    Launcher(  # MPICH, Intel MPI
        "mpich", "PMI_RANK", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS", start=("PMI_JOBID",),
    ),
    Launcher(
        "slurm", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE",
        node_rank="SLURM_NODEID", attempt="SLURM_RESTART_COUNT", hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        start=("SLURM_JOB_ID", "SLURM_STEP_ID"), seen=_started_by_srun, read=_read_slurm,
    ),
    Launcher(
        "pytorchjob", "PET_NODE_RANK", "RANK", "", "WORLD_SIZE", "", node_rank="PET_NODE_RANK", nodes="PET_NNODES",
        seen=_in_pytorchjob, read=_read_pod,
    ),
    Launcher(
        "trainer", "PET_NODE_RANK", "PET_NODE_RANK", "", "PET_NNODES", "", node_rank="PET_NODE_RANK",
        nodes="PET_NNODES", address="PET_MASTER_ADDR", port="PET_MASTER_PORT", seen=_in_trainjob, read=_read_pod,
    ),
)  # fmt: skip


def discover(environ: Environ | None = None) -> RankInfo:
    """The place that ``environ`` (by default this process's) describes; a world of one where no launcher is seen.

    A variable that is empty counts as not set. Raises DiscoveryError where the variables contradict each other, leave
    something open, or show that ranks were meant to be started and were not.
    """
    environ = {name: value for name, value in (os.environ if environ is None else environ).items() if value != ""}
    seen = [launcher for launcher in LAUNCHERS if launcher.is_seen(environ)]
    if seen and (len(seen) == 1 or seen[0].final):
        return seen[0].read(seen[0], environ)
    if seen:
        return _settle(seen, environ)
    _refuse_to_be_alone(environ)
    return RankInfo()


def _settle(seen: list[Launcher], environ: Environ) -> RankInfo:
    """The place among several launchers that have left variables, from the innermost to the outermost."""
    places: dict[Launcher, RankInfo] = {}
    errors = []
    for launcher in seen:
        try:
            places[launcher] = launcher.read(launcher, environ)
        except DiscoveryError as error:
            errors.append(error)
    if not places:
        raise errors[-1]
    chosen = next(iter(places))
    for other in seen:
        if _agrees(other, places.get(other), environ, places[chosen]):
            if chosen.name == "env" and other in places:
                chosen = other  # the same numbers, written down once more by hand
        elif other not in places or not _may_contain(places[other], places[chosen]):
            raise DiscoveryError(
                f"{_show(chosen, environ)} and {_show(other, environ)} contradict each other: unset what is left over "
                "from another launcher, or start the script with one launcher only"
            )
    return places[chosen]


def _agrees(other: Launcher, its: RankInfo | None, environ: Environ, place: RankInfo) -> bool:
    """Whether all that another launcher says is so in ``place``; ``its`` own is None where it doesn't say enough."""
    if its:
        return all(
            getattr(its, name) == getattr(place, name)
            for name in ("rank", "local_rank", "world_size", "local_world_size")
        )
    if other.name != "env" and other.world_size not in environ:
        raise DiscoveryError(
            f"{_show(other, environ)} is set without {other.world_size}, beside the variables of another launcher: "
            "unset what is left over"
        )
    said = ((other.rank, place.rank), (other.local_rank, place.local_rank), (other.world_size, place.world_size))
    return all(_number(environ, name) == value for name, value in said if name in environ)


def _may_contain(outer: RankInfo, inner: RankInfo) -> bool:
    """Whether ``inner``'s launcher may have been started by ``outer``'s: once per node, with a rank or more on each."""
    return outer.world_size == outer.nodes and inner.world_size - inner.local_world_size >= outer.nodes - 1


def _refuse_to_be_alone(environ: Environ) -> None:
    """Raise where this process was meant to be one of several, but nobody has started the others."""
    nodes = environ.get("PET_NNODES", "1")
    if nodes != "1":
        raise DiscoveryError(
            f"PET_NNODES={nodes} says that this pod is one of several, but no launcher started this process, so every "
            f"pod would train alone: {_LAUNCH}"
        )
    for name, what in (("SLURM_NTASKS", "tasks"), ("SLURM_NNODES", "nodes")):
        if _number(environ, name, default=1) > 1:
            raise DiscoveryError(
                f"{name}={environ[name]} says that this Slurm job has {environ[name]} {what}, but srun did not start "
                "this process, so the others would never come: start it with `srun python script.py`, or set "
                "WORLD_SIZE=1 to train alone"
            )


def _place(
    launcher: Launcher,
    environ: Environ,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    node_rank: int | None,
    nodes: int | None,
) -> RankInfo:
    """The place, after a check that its numbers fit each other. ``nodes`` is None where the launcher does not tell."""
    shown = _show(launcher, environ)
    if world_size < 1 or rank >= world_size:
        raise DiscoveryError(f"{shown}: {launcher.rank} must be less than {launcher.world_size}")
    if nodes is not None and node_rank is not None and node_rank >= nodes:
        raise DiscoveryError(f"{shown}, {launcher.node_rank}={node_rank}: there are {nodes} nodes, counted from 0")
    if local_world_size > world_size:
        raise DiscoveryError(f"{shown}: {launcher.local_world_size} is more than {launcher.world_size}")
    if local_rank >= local_world_size:
        raise DiscoveryError(f"{shown}: {launcher.local_rank} must be less than {launcher.local_world_size}")
    if nodes is None or node_rank is None:
        node_rank, nodes = rank // local_world_size, world_size // local_world_size
        if world_size % local_world_size:
            raise DiscoveryError(
                f"{shown}: {launcher.world_size} is not a multiple of {launcher.local_world_size}; every node must "
                "have as many ranks as the others"
            )
        if rank % local_world_size != local_rank:
            raise DiscoveryError(
                f"{shown}: the ranks must follow on node by node, so {launcher.local_rank} should be "
                f"{rank % local_world_size}; with mpirun: --map-by slot"
            )
    elif local_world_size + nodes - 1 > world_size or (nodes == 1 and local_world_size < world_size):
        raise DiscoveryError(f"{shown} do not fit each other on {nodes} node{'' if nodes == 1 else 's'}")
    return RankInfo(
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank=node_rank,
        launcher=launcher.name,
        master=_master(launcher, environ, nodes) if world_size > 1 else None,
        attempt=_number(environ, launcher.attempt, default=0),
        nodes=nodes,
        agent_store=launcher.agent_store and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _master(launcher: Launcher, environ: Environ, nodes: int) -> tuple[str, int] | None:
    """Where the ranks of several meet; None where the variables do not tell and the launcher's communicator has to."""
    shown = _show(launcher, environ)
    start = "/".join(environ[name] for name in launcher.start or () if name in environ)
    address, port = environ.get(launcher.address), environ.get(launcher.port)
    if address is None and launcher.start is not None:
        hosts = _first(environ, *launcher.hosts) if launcher.hosts else ""
        if nodes == 1:
            address = "127.0.0.1"
        elif hosts in environ:
            try:
                address = hostlist.first_host(environ[hosts])
            except ValueError as error:
                raise DiscoveryError(f"{hosts}={environ[hosts]}: {error}") from None
        elif port is None and not hosts:
            return None
    if address is None:
        raise DiscoveryError(f"{launcher.address} must be set beside {shown}: it says where the ranks meet")
    if port is None and start:
        return address, _FIRST_PORT + zlib.crc32(start.encode()) % _PORTS
    if port is None and launcher.start is not None and launcher.address not in environ:
        return None
    if port is None:
        raise DiscoveryError(f"{launcher.port} must be set beside {shown}: it says where the ranks meet")
    if not 0 < (number := _number(environ, launcher.port)) < 1 << 16:
        raise DiscoveryError(f"{launcher.port}={port} is not a port: expected 1 to 65535")
    return address, number


def _number(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _NUMBER.fullmatch(text):
        raise DiscoveryError(f"{name}={text} is not a whole number from 0 on")
    return int(text)


def _first(environ: Environ, *names: str) -> str:
    """The first of ``names`` that is set, else the last one."""
    return next((name for name in names if name in environ), names[-1])


def _show(launcher: Launcher, environ: Environ, *more: str) -> str:
    names = (launcher.mark, launcher.rank, launcher.local_rank, launcher.world_size, launcher.local_world_size, *more)
    return ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names) if name in environ)
