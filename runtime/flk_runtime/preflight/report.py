"""RankReport: one rank's facts about itself and its node, for the preflight to compare."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flk_runtime.contract import pod_env, user_env


@dataclass(frozen=True)
class RankReport:
    """The report of one rank. An empty string means: not known."""

    rank: int
    world_size: int
    local_world_size: int = 1
    node: str = ""  # for messages: pod and node, or host name
    pid: int = 0
    launcher: str = ""
    torch: str = ""
    flk: str = ""
    code: str = ""
    backend: str = ""
    strategy: str = ""
    seed: int = 0
    device: str = ""


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
        return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    return ""
