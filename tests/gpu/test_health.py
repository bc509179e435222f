"""What NVML says of a real GPU to the launcher's check before an attempt."""

from __future__ import annotations

import subprocess
import sys

from flk_runtime.launcher.telemetry.usage import find_faults, read_errors

FAILS = "import torch; torch.zeros(4, device='cuda')[torch.full((4,), 9, device='cuda')]; torch.cuda.synchronize()"


def test_a_gpu_is_healthy_before_and_after_a_program_has_failed_on_it() -> None:
    for _ in range(2):
        gpus = read_errors()
        assert gpus
        assert set(gpus) == {0}
        assert list(find_faults(len(gpus), gpus)) == []
        failed = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=120)
        assert "device-side assert triggered" in failed.stderr
    assert list(find_faults(len(gpus) + 1, gpus)) == [
        f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} of {len(gpus) + 1} can be seen"
    ]
