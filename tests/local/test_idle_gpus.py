"""A job whose GPUs do nothing saves and ends after the time that its user allows. NVML is a stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flk_runtime.contract.failure import ExitCode
from flk_runtime.contract.record import JobRecord
from tests.support.collection import often

# The launcher as it is, with GPUs that NVML tells to be idle, or none.
LAUNCHER = """
import pathlib, sys
from flk_runtime.contract.telemetry import GpuUsage
from flk_runtime.launcher import start
from flk_runtime.launcher.telemetry import health
from flk_runtime.launcher.telemetry import usage

def read():
    return [GpuUsage(0.01 if pathlib.Path("idle").exists() else 1.0, 1, 2)]

case = sys.argv.pop(1)
usage.open_gpus = lambda: read if case in ("sleeps", "trains") else list
usage.INTERVAL = 0.1
start._check_build_of_torch = lambda settings: None  # this torch is for CPUs
start.main(sys.argv[2:])
"""

IDLE = "import pathlib, time; pathlib.Path('idle').touch(); time.sleep(600)"
TRAIN = """
import pathlib, time
import torch
import flk_runtime as flk

run = flk.init(device="cpu")
run.parallelize(torch.nn.Linear(2, 2))
while True:
    run.step()
    pathlib.Path("idle").touch()
    time.sleep(0.01)
"""
SCRIPTS = {
    "sleeps": IDLE,
    "trains": TRAIN,
    "unknown": "import time; time.sleep(6)",
    "none": "import time; time.sleep(6)",
}


@pytest.mark.parametrize("gpus", often((0, 1), SCRIPTS))
def test_idle_gpus_end_the_job(gpus: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[gpus])
    variables = {
        "FLK_CHECKPOINT": str(tmp_path / "saved"),
        "FLK_SAVE_EVERY": "1000000",
        "FLK_IDLE_TIMEOUT": "1",
        "FLK_GPUS": "0" if gpus == "none" else "1",
        "FLK_PREFLIGHT": "-health",
        "FLK_RESTARTS": "3",
    }
    variables |= {"FLK_TERMINATION_LOG": str(tmp_path / "end"), "FLK_START": "spawn", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", LAUNCHER, gpus, "--", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    if gpus in ("unknown", "none"):
        assert done.returncode == 0, done.stderr
        why = {"unknown": " while the GPUs of pod 0 cannot be measured", "none": ": the pods request no GPU"}[gpus]
        assert done.stderr.count(f"FLK_IDLE_TIMEOUT ends nothing{why}") == 1
        return
    assert done.returncode == ExitCode.TIMEOUT, done.stderr
    record = JobRecord.from_json((tmp_path / "end").read_text())
    assert record is not None
    assert record.failure is not None
    assert len(record.attempts) == 1
    saves = sorted(path.name for path in (tmp_path / "saved").glob("step-*"))
    assert len(saves) == (gpus == "trains")
    saved = f"; saved after step {int(saves[0].removeprefix('step-'))}" if saves else ""
    assert record.failure.summary.endswith(f"leaves its GPUs idle: none of the job was busy in the last 1 s{saved}")
