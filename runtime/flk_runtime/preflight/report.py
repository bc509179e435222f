"""What a rank knows of itself and its node, for the preflight to compare."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flk_runtime import contract
from flk_runtime.discovery import RankInfo
from flk_runtime.system import host

SHM = "/dev/shm"  # noqa: S108 - the folder itself is what is asked about
_LOOPBACK_FLAG = 0x8  # IFF_LOOPBACK


@dataclass(frozen=True)
class RankReport:
    """One rank's. Empty text, and -1, mean that it does not know or that it does not matter."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    node: str = ""  # for people: pod or host
    network: str = ""  # equal where ranks share a loopback interface: one machine, one network namespace
    pid: int = 0
    launcher: str = ""
    torch: str = ""
    flk: str = ""
    code: str = ""
    backend: str = ""
    strategy: str = ""
    seed: int = 0
    device: str = ""
    gpu: str = ""  # see device.identity
    shm: int = -1  # bytes of shared memory
    loopback: str = ""  # why its collectives would go through the loopback interface
    absent: str = ""  # the variable that names an interface which is not there
    way: str = ""  # the interface that leads to the master
    problem: str = ""  # why this rank can't begin

    def dump(self) -> str:
        """One line."""
        return json.dumps([getattr(self, name) for name in _NAMES], separators=(",", ":"))

    @classmethod
    def load(cls, line: str | bytes) -> RankReport:
        return cls(**dict(zip(_NAMES, json.loads(line), strict=True)))


_NAMES = tuple(field.name for field in fields(RankReport))


def of_node(place: RankInfo, backend: str, environ: Mapping[str, str] = os.environ, shm: str = SHM) -> dict[str, Any]:
    """The facts of the node and its network, by name."""
    known: dict[str, Any] = {"node": node_name(environ), "network": _network(environ), "shm": _size(shm)}
    if place.nodes > 1 or "GLOO_SOCKET_IFNAME" in environ or "NCCL_SOCKET_IFNAME" in environ:
        # Asking for the host's own name can take seconds where name service is broken: only if it matters.
        known |= _interfaces(backend, environ, look_up=place.nodes > 1)
    if place.master:
        known["way"] = interface_to(place.master[0])
    return known


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node as people know it: the pod and where it runs, or the host."""
    names = [environ.get(contract.POD_NAME, ""), environ.get(contract.NODE_NAME, "") or socket.gethostname()]
    return " on ".join(dict.fromkeys(filter(None, names)))


def code_version(environ: Mapping[str, str] = os.environ) -> str:
    """What runs: the hash of the shipped archive, else of the main script's file; empty where there is neither."""
    if environ.get(contract.CODE_HASH):
        return f"archive {environ[contract.CODE_HASH][:12]}"
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    with contextlib.suppress(OSError, TypeError):
        content = Path(str(path)).read_bytes()
        return f"{Path(str(path)).name} {hashlib.sha256(content).hexdigest()[:12]}"
    return ""


def interface_to(address: str) -> str:
    """The network interface that leads to this address, or an empty string. Sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return host.interface_with_address(probe.getsockname()[0])
    return ""


def _network(environ: Mapping[str, str]) -> str:
    parts = [environ.get(contract.NODE_NAME, "")]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts) if len(parts) == 3 else f"{parts[0]} {socket.gethostname()}"


def _size(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return -1
    return found.f_blocks * found.f_frsize


def _interfaces(backend: str, environ: Mapping[str, str], *, look_up: bool) -> dict[str, str]:
    """``loopback`` and ``absent``, by the rules of gloo (names) and NCCL (see `nccl_choice`)."""
    names = [name for _, name in socket.if_nameindex()]
    loops = {name for name in names if _is_loopback(name)}
    gloo = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    wanted = {"GLOO_SOCKET_IFNAME": gloo}
    chosen = {"GLOO_SOCKET_IFNAME": [name for name in gloo if name in names]}
    if "nccl" in backend and environ.get("NCCL_SOCKET_IFNAME"):
        text = environ["NCCL_SOCKET_IFNAME"]
        wanted["NCCL_SOCKET_IFNAME"] = [text]
        chosen["NCCL_SOCKET_IFNAME"] = nccl_choice(text, names)
    known: dict[str, str] = {}
    for variable, names_wanted in wanted.items():
        shown = f"{variable}={environ.get(variable, '')}"
        if names_wanted and not chosen[variable]:
            known.setdefault("absent", shown)
        elif chosen[variable] and loops.issuperset(chosen[variable]):
            known.setdefault("loopback", shown)
    if look_up and not gloo and "gloo" in backend and (address := _gloo_default()).startswith("127."):
        known.setdefault("loopback", f"the host name {socket.gethostname()} means {address} there")
    return known


def nccl_choice(text: str, names: Sequence[str]) -> list[str]:
    """The interfaces among ``names`` that NCCL_SOCKET_IFNAME=``text`` allows.

    It lists prefixes; ``=`` makes them whole names, ``^`` all but them (NCCL user guide, environment variables).
    """
    negated = text.startswith("^")
    exact = text.removeprefix("^").startswith("=")
    given = tuple(filter(None, text.lstrip("^=").split(",")))
    return [name for name in names if (name in given if exact else name.startswith(given)) != negated]


def _is_loopback(name: str) -> bool:
    try:
        return bool(int(Path("/sys/class/net", name, "flags").read_text(), 16) & _LOOPBACK_FLAG)
    except (OSError, ValueError):
        return name == "lo"


def _gloo_default() -> str:
    """The address that gloo takes by itself: the one that the host name means, else the loopback's."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for *_, address in found:
        if host.is_local_address(str(address[0])):
            return str(address[0])
    return "127.0.0.1"
