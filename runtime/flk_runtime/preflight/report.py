"""RankReport: one rank's facts about itself, its node and its network, for the preflight to compare."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.pod_layout import SHM


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
    problem: str = ""  # why this rank cannot start

    def dump(self) -> str:
        """The report as one line of JSON."""
        return json.dumps([getattr(self, name) for name in _NAMES], separators=(",", ":"))

    @classmethod
    def load(cls, line: str | bytes) -> RankReport:
        """The report in a line that `dump` made."""
        return cls(**dict(zip(_NAMES, json.loads(line), strict=True)))


_NAMES = tuple(field.name for field in fields(RankReport))


def node_fields() -> dict[str, Any]:
    """The fields of a RankReport about the node, by name."""
    uses_shm = os.environ.get("NCCL_SHM_DISABLE", "0") in ("", "0")
    return {"node": node_name(), "network": _network(os.environ), "shm": _size(SHM), "nccl_shm": uses_shm}


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
