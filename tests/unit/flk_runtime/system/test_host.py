"""CPUs and OOM kills for both versions of control groups, GPUs, network interfaces."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flk_runtime.system import host


def files(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({}, 64),
    ],
)
def test_cpu_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, str], expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert host.cpu_count(files(tmp_path, content)) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"memory.events": "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\n"}, 2),
        ({"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"}, 7),
        ({}, 0),
    ],
)
def test_oom_kills(tmp_path: Path, content: dict[str, str], expected: int) -> None:
    assert host.oom_kills(files(tmp_path, content)) == expected


def test_source_address() -> None:
    assert host.source_address("127.0.0.1") == "127.0.0.1"
    assert host.source_address("no.such.name.invalid") == ""


def test_interface_with_address() -> None:
    assert host.interface_with_address("127.0.0.1") == "lo"
    assert host.interface_with_address("192.0.2.1") == host.interface_with_address("fd00::7") == ""


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.2", True), ("::1", True), ("localhost", True), ("127.example", False)]
)
def test_loopback(address: str, expected: bool) -> None:
    assert host.is_loopback(address) is expected


def test_the_exit_code_of_a_process_that_somebody_waits_for_is_not_taken_away() -> None:
    """The launcher's loop waits for adopted processes, and a thread of the launcher for its hub."""
    hub = subprocess.Popen(["sh", "-c", "exit 2"])
    adopted = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], os.environ)
    for pid in (hub.pid, adopted):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    host.reap_orphans(lambda: [hub.pid])
    assert hub.wait() == 2
    host.reap_orphans()
    with pytest.raises(ChildProcessError):
        os.waitpid(adopted, os.WNOHANG)
