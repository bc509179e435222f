"""Readings of control groups."""

from __future__ import annotations

import os
from pathlib import Path

from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry.usage import Counters, Meter, read

PROC = {"meminfo": "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n"}


def files(folder: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_control_group_of_version_2(tmp_path: Path) -> None:
    group = {
        "cgroup.controllers": "cpu io memory\n",
        "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
        "cpu.max": "150000 100000\n",
        "memory.current": "5000\n",
        "memory.stat": "anon 1\ninactive_file 2000\n",
        "memory.max": "9000\n",
    }
    found = read(files(tmp_path / "group", group), files(tmp_path / "proc", PROC))
    assert found == Counters(2.5, 1.5, 3000, 9000)


def test_a_machine_without_a_control_group_of_its_own(tmp_path: Path) -> None:
    found = read(files(tmp_path / "group", {"cgroup.controllers": ""}), files(tmp_path / "proc", PROC))
    assert found == Counters(None, len(os.sched_getaffinity(0)), None, 1000 << 10)


def test_counters_become_rates() -> None:
    meter = Meter(Settings(("train.py",), pod=3, pod_name="job-3", node="n"))
    meter.measure(100.0, 1.7e9, Counters(5.0, 4.0, 70, 90), [])
    first = meter.latest
    assert first is not None
    assert (first.cpu, first.memory) == (None, 70)
    meter.measure(110.0, 1.7e9 + 10, Counters(25.0, 4.0, 80, 90), [])
    found = meter.latest
    assert found is not None
    assert (found.pod, found.pod_name, found.node, found.time) == (3, "job-3", "n", 1.7e9 + 10)
    assert (found.cpu, found.cpu_limit, found.memory, found.memory_limit) == (2.0, 4.0, 80, 90)
