"""A network of several hosts on this machine: network namespaces on one bridge, with faults between them.

It needs root, ip, iptables and tc. Nothing of this machine's own network is changed: the bridge has a namespace, too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

TOOLS = ("ip", "iptables", "ip6tables", "tc")
_NEWNET, _NEWNS = 0x40000000, 0x00020000  # of clone(2)
_BIND, _RECURSIVE, _SLAVE, _DETACH = 0x1000, 0x4000, 0x80000, 2  # of mount(2) and umount(2)
LEADER_NAME = "leader.test"  # resolves to the host that `Network.name_leader` has named


class Host:
    """A network namespace with one interface. A fault affects what this host receives or sends."""

    def __init__(self, name: str, index: int, *, ipv6: bool) -> None:
        self.name = name
        self.ipv6 = ipv6
        self.address = f"fd77::{index + 1:x}" if ipv6 else f"10.77.0.{index + 1}"

    @property
    def prefix(self) -> list[str]:
        """The first words of a command that runs on this host."""
        return ["ip", "netns", "exec", self.name]

    def cut(self, other: Host | None = None, *, receives: bool = True, sends: bool = True) -> None:
        """Drop all packets from and to another host, or all hosts, silently."""
        if receives:
            self._tables("-A", "INPUT", *(["-s", other.address] if other else []), "-i", "eth0", "-j", "DROP")
        if sends:
            self._tables("-A", "OUTPUT", *(["-d", other.address] if other else []), "-o", "eth0", "-j", "DROP")

    def lose(self, share: float) -> None:
        """Drop this share of the packets that arrive, at random."""
        loss = ["-m", "statistic", "--mode", "random", "--probability", str(share)]
        self._tables("-A", "INPUT", "-i", "eth0", *loss, "-j", "DROP")

    def limit(self, rate: str) -> None:
        """Limit what this host sends to a rate in the notation of tc, such as 256kbit."""
        queue = ["tbf", "rate", rate, "burst", "16kbit", "latency", "500ms"]
        _do(*self.prefix, "tc", "qdisc", "replace", "dev", "eth0", "root", *queue)

    def heal(self) -> None:
        """End cuts and losses."""
        self._tables("-F")

    def _tables(self, *arguments: str) -> None:
        _do(*self.prefix, "ip6tables" if self.ipv6 else "iptables", "-w", *arguments)


class Network:
    """Hosts that reach each other."""

    def __init__(self, *, ipv6: bool = False) -> None:
        self._id = f"flk-{uuid.uuid4().hex[:6]}"
        self._ipv6 = ipv6
        self._switch = f"{self._id}-switch"
        self._names: list[str] = []
        self.hosts: list[Host] = []

    def add(self) -> Host:
        """Add a host, with an address that no other has had."""
        if not self._names:
            self._create(self._switch)
            self._in_switch("ip", "link", "add", "bridge0", "type", "bridge")
            self._in_switch("ip", "link", "set", "bridge0", "up")
        index = len(self.hosts)
        host = Host(f"{self._id}-{index}", index, ipv6=self._ipv6)
        self._create(host.name)
        self.hosts.append(host)
        port = f"port{index}"
        self._in_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        self._in_switch("ip", "link", "set", port, "master", "bridge0", "up")
        self.give_address(host, host.address)
        _do(*host.prefix, "ip", "link", "set", "eth0", "up")
        _do(*host.prefix, "ip", "link", "set", "lo", "up")
        return host

    def give_address(self, host: Host, address: str) -> None:
        """Give a host a further address."""
        flags = ["nodad"] if self._ipv6 else []
        _do(*host.prefix, "ip", "address", "add", f"{address}/{64 if self._ipv6 else 24}", "dev", "eth0", *flags)

    def name_leader(self, address: str) -> None:
        """Let LEADER_NAME resolve to this address on all hosts, also for processes that run already."""
        for host in self.hosts:
            path = Path("/etc/netns", host.name, "hosts")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"127.0.0.1 localhost\n::1 localhost\n{address} {LEADER_NAME}\n")

    def close(self) -> None:
        """Remove all hosts."""
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _do("ip", "netns", "delete", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def _create(self, name: str) -> None:
        _do("ip", "netns", "add", name)
        self._names.append(name)

    def _in_switch(self, *command: str) -> None:
        _do("ip", "netns", "exec", self._switch, *command)


def enter(host: str) -> None:
    """Move this process, which has one thread, to a host, as ``ip netns exec`` starts a program there."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    file = os.open(f"/run/netns/{host}", os.O_RDONLY)
    call("setns", file, _NEWNET)
    os.close(file)
    call("unshare", _NEWNS)
    call("mount", b"", b"/", b"none", ctypes.c_ulong(_SLAVE | _RECURSIVE), None)
    with suppress(OSError):  # not where /sys may not be mounted
        call("umount2", b"/sys", _DETACH)
        call("mount", host.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None)
    call("mount", f"/etc/netns/{host}/hosts".encode(), b"/etc/hosts", b"none", ctypes.c_ulong(_BIND), None)


@contextmanager
def network(hosts: int, *, ipv6: bool = False) -> Iterator[Network]:
    """A network with so many hosts. The test is skipped where namespaces cannot be created."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    made = Network(ipv6=ipv6)
    try:
        try:
            for _ in range(hosts):
                made.add()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be created here: {error.stderr.strip()}")
        yield made
    finally:
        made.close()


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
