"""RankReport: one rank's facts about itself, its node and its network, for the preflight to compare."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flk_runtime.contract import pod_env, user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.system import host

SHM = "/dev/shm"  # noqa: S108 - nothing is created there; its size is reported
# What NCCL opens for a fabric: without it, it takes TCP and says nothing.
_PLUGIN = "libnccl-net.so"
_VERBS = "libibverbs.so.1"
_LIBRARIES = {"efa": _PLUGIN, "gib": _PLUGIN, "tcpx": _PLUGIN, "tcpxo": _PLUGIN, "infiniband": _VERBS, "roce": _VERBS}


@dataclass(frozen=True)
class RankReport:
    """The report of one rank. An empty string or -1 means: not known, or of no importance on this rank."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    node: str = ""  # for messages: pod and node, or host name
    network: str = ""  # equal on ranks that share a loopback interface: one machine, one network namespace
    pid: int = 0
    launcher: str = ""
    torch: str = ""
    flk: str = ""
    code: str = ""
    backend: str = ""
    strategy: str = ""
    seed: int = 0
    device: str = ""
    gpu: str = ""  # see system.device.unique_id
    shm: int = -1  # size of /dev/shm in bytes
    nccl_shm: bool = True  # whether NCCL may use it (NCCL_SHM_DISABLE)
    interface: str = ""  # the interface that leads to the master
    missing_library: str = ""  # the library, with the fabric, that NCCL opens between nodes and that is not there
    problem: str = ""  # why this rank cannot start

    def dump(self) -> str:
        """The report as one line of JSON."""
        return json.dumps([getattr(self, name) for name in _NAMES], separators=(",", ":"))

    @classmethod
    def load(cls, line: str | bytes) -> RankReport:
        """The report in a line that `dump` made."""
        return cls(**dict(zip(_NAMES, json.loads(line), strict=True)))


_NAMES = tuple(field.name for field in fields(RankReport))


def node_fields(info: RankInfo, backend: str) -> dict[str, Any]:
    """The fields of a RankReport about the node and its network, by name."""
    environ = os.environ
    found: dict[str, Any] = {"node": node_name(environ), "network": _network(environ), "shm": _size(SHM)}
    found["nccl_shm"] = environ.get("NCCL_SHM_DISABLE", "0") in ("", "0")
    if info.master:
        found["interface"] = interface_to(info.master[0])
    if info.nodes > 1 and "nccl" in backend:
        found["missing_library"] = missing_library(environ)
    return found


def missing_library(environ: Mapping[str, str], load: Callable[[str], object] = ctypes.CDLL) -> str:
    """The library that NCCL opens for the job's fabric, with the fabric, if it cannot be loaded; else an empty string.

    A plugin that NCCL_NET_PLUGIN names has another file, which is not looked for.
    """
    fabric = user_env.FABRIC.read(environ)
    library = _LIBRARIES.get(fabric)
    if library is None or (library == _PLUGIN and environ.get("NCCL_NET_PLUGIN")):
        return ""
    try:
        load(library)
    except OSError:
        return f"{library} (fabric {fabric})"
    return ""


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """The name of this node for messages: ``<pod> on <node>`` in a pod, else the host name."""
    names = [environ.get(user_env.POD_NAME, ""), environ.get(user_env.NODE_NAME, "") or socket.gethostname()]
    return " on ".join(dict.fromkeys(filter(None, names)))


def code_version() -> str:
    """The hash of the shipped archive, else of the main script's file; empty if there is neither."""
    if code := os.environ.get(pod_env.CODE_HASH):
        return f"archive {code[:12]}"
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        return f"{path.name} {hashlib.sha256(content).hexdigest()[:12]}"
    return ""


def interface_to(address: str) -> str:
    """The network interface that leads to this address or host name, or an empty string. Sends nothing."""
    source = host.source_address(address)
    return host.interface_with_address(source) if source else ""


def _network(environ: Mapping[str, str]) -> str:
    parts = [environ.get(user_env.NODE_NAME, "")]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts) if len(parts) == 3 else f"{parts[0]} {socket.gethostname()}"


def _size(folder: str) -> int:
    """The size of a folder's file system in bytes, or -1."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return -1
    return found.f_blocks * found.f_frsize
