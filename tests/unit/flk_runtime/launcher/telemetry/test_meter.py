"""What a pod uses between two readings."""

from __future__ import annotations

from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry.meter import Meter
from flk_runtime.launcher.telemetry.usage import Counters


def test_counters_become_rates() -> None:
    meter = Meter(Settings(("train.py",), pod=3, pod_name="job-3", node="n"))
    meter.measure(100.0, 1.7e9, Counters(5.0, 4.0, 70, 90, 1000, 0, None, 10), [])
    first = meter.latest
    assert first is not None
    assert (first.cpu, first.received, first.memory) == (None, None, 70)
    meter.measure(110.0, 1.7e9 + 10, Counters(25.0, 4.0, 80, 90, 3000, 50, None, 5), [])
    found = meter.latest
    assert found is not None
    assert (found.pod, found.pod_name, found.node, found.time) == (3, "job-3", "n", 1.7e9 + 10)
    assert (found.cpu, found.cpu_limit, found.memory, found.memory_limit) == (2.0, 4.0, 80, 90)
    assert (found.received, found.sent, found.disk_read, found.disk_written) == (200.0, 5.0, None, 0.0)
