"""Who am I? The place of this process in its job, out of the variables that its launcher has set.

A pure function of the environment. Each launcher is one line of the table LAUNCHERS: which variable shows it, and under
which names it gives the six numbers. The first line that matches is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from flk_runtime import contract
from flk_runtime.errors import DiscoveryError

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Place:
    """Where this process stands: rank in [0, world_size), and local_rank in [0, local_world_size) on its node."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "alone"  # flk, torchrun, horovod, slurm, openmpi, mpich, pytorchjob, trainer, env, alone
    # Host and port where the ranks meet. None in a world of one, and where only the launcher's own communicator can tell.
    master: tuple[str, int] | None = None
    attempt: int = 0  # how often this job's ranks have been started before
    nodes: int = 1
    agent_store: bool = False  # the launcher holds the store at ``master``, so that no rank opens one there


@dataclass(frozen=True)
class Launcher:
    """The names that a launcher gives its variables. It is recognised by ``mark``, which must be set."""

    name: str
    mark: str
    attempt: str
    rank: str = "RANK"
    local_rank: str = "LOCAL_RANK"
    world_size: str = "WORLD_SIZE"
    local_world_size: str = "LOCAL_WORLD_SIZE"
    node_rank: str = "GROUP_RANK"


# From the most particular to the most general: flk's launcher sets torchrun's variables too.
LAUNCHERS = (
    Launcher("flk", mark=contract.ATTEMPT, attempt=contract.ATTEMPT),
    Launcher("torchrun", mark="TORCHELASTIC_RUN_ID", attempt="TORCHELASTIC_RESTART_COUNT"),
    Launcher("env", mark="RANK", attempt="TORCHELASTIC_RESTART_COUNT"),  # set by hand, or by a launcher like torchrun
    Launcher("env", mark="WORLD_SIZE", attempt="TORCHELASTIC_RESTART_COUNT"),
    Launcher("env", mark="LOCAL_RANK", attempt="TORCHELASTIC_RESTART_COUNT"),
)


def discover(environ: Mapping[str, str] | None = None) -> Place:
    """The place that ``environ`` (by default this process's) describes; a world of one where no launcher is seen.

    A variable that is empty counts as not set. Raises DiscoveryError where the variables contradict each other.
    """
    environ = {name: value for name, value in (os.environ if environ is None else environ).items() if value != ""}
    for launcher in LAUNCHERS:
        if launcher.mark in environ:
            return _read(launcher, environ)
    nodes = environ.get("PET_NNODES", "1")
    if nodes != "1":
        raise DiscoveryError(
            f"PET_NNODES={nodes} says that this pod is one of several, but no launcher started this process, so every "
            "pod would train alone: start the script with `torchrun script.py` or `python -m flk_runtime script.py`"
        )
    return Place()


def _read(launcher: Launcher, environ: Mapping[str, str]) -> Place:
    names = (launcher.rank, launcher.local_rank, launcher.world_size, launcher.local_world_size)
    shown = _show(environ, names)
    if launcher.local_rank not in environ and environ.get(launcher.world_size) == "1":
        environ = {**environ, launcher.local_rank: "0"}  # a world of one leaves nothing open
    if launcher.local_rank not in environ and "PET_NODE_RANK" in environ:
        raise DiscoveryError(
            f"{shown} and PET_NODE_RANK={environ['PET_NODE_RANK']} are a PyTorchJob's: RANK is the number of the pod, "
            "and no launcher started this process: start the script with `torchrun script.py` or "
            "`python -m flk_runtime script.py`"
        )
    if environ.get(launcher.world_size) == "1":
        environ = {launcher.local_world_size: "1", **environ}
    missing = [name for name in names if name not in environ]
    if missing:
        raise DiscoveryError(
            f"{' and '.join(missing)} must be set beside {shown or launcher.mark + '=' + environ[launcher.mark]}: "
            "a launcher sets all of them"
        )
    rank, local_rank, world_size, local_world_size = (_number(environ, name) for name in names)
    if world_size < 1 or rank >= world_size:
        raise DiscoveryError(f"{shown}: {launcher.rank} must be less than {launcher.world_size}")
    if local_world_size > world_size:
        raise DiscoveryError(f"{shown}: {launcher.local_world_size} is more than {launcher.world_size}")
    if local_rank >= local_world_size:
        raise DiscoveryError(f"{shown}: {launcher.local_rank} must be less than {launcher.local_world_size}")
    return Place(
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank=_number(environ, launcher.node_rank, default=rank // local_world_size),
        launcher=launcher.name,
        master=_master(environ, shown) if world_size > 1 else None,
        attempt=_number(environ, launcher.attempt, default=0),
        nodes=-(-world_size // local_world_size),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _master(environ: Mapping[str, str], shown: str) -> tuple[str, int]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise DiscoveryError(f"{name} must be set beside {shown}: it says where the ranks meet")
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise DiscoveryError(f"MASTER_PORT={port} is not a port: expected 1 to 65535")
    return environ["MASTER_ADDR"], port


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _NUMBER.fullmatch(text):
        raise DiscoveryError(f"{name}={text} is not a whole number from 0 on")
    return int(text)


def _show(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
