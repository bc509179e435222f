"""A job whose GPUs do nothing ends after the time that its user allows. NVML is a stand-in: there is no GPU here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.record import JobRecord

# The launcher as it is, with GPUs that NVML tells to be idle, or none.
LAUNCHER = """
import sys
from flk_runtime.contract.telemetry import GpuUsage
from flk_runtime.launcher import health, start
from flk_runtime.launcher.telemetry import gpus, meter

class Nvml:
    def read(self):
        return [GpuUsage(0.01, 1, 2)]

case = sys.argv.pop(1)
gpus.Gpus.open = classmethod(lambda cls: Nvml() if case == "idle" else None)
meter.INTERVAL = 0.1
start._check_build_of_torch = lambda settings: None  # this torch is for CPUs
start.main(sys.argv[2:])
"""


@pytest.mark.parametrize("gpus", ["idle", "unknown", "none"])
def test_idle_gpus_end_the_job(gpus: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import time; time.sleep({600 if gpus == 'idle' else 6})")
    variables = {
        "FLK_IDLE_TIMEOUT": "1",
        "FLK_GPUS": "0" if gpus == "none" else "1",
        "FLK_PREFLIGHT": "-health",
        "FLK_RESTARTS": "3",
    }
    variables |= {"FLK_TERMINATION_LOG": str(tmp_path / "end"), "FLK_START": "spawn", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", LAUNCHER, gpus, "--", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    if gpus != "idle":
        assert done.returncode == 0, done.stderr
        why = {"unknown": "the GPUs of pod 0 cannot be measured", "none": "the pods request no GPU"}[gpus]
        assert done.stderr.count(f"FLK_IDLE_TIMEOUT ends nothing: {why}") == 1
        return
    assert done.returncode == ExitCode.TIMEOUT, done.stderr
    record = JobRecord.from_json((tmp_path / "end").read_text())
    assert record is not None
    assert record.failure is not None
    assert len(record.attempts) == 1
    assert record.failure.summary.endswith("leaves its GPUs idle: none of the job was busy in the last 1 s")
