"""Two intervals of checkpoints in the cluster: what a killed rank and a job without pods go back to.

Each run of the tests shows it on one machine, in tests/local/test_two_intervals.py.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.preemption import TRAIN


@pytest.mark.soak
def test_a_killed_rank_resumes_from_memory_and_a_lost_job_from_storage(
    flk: Any, kubectl: Any, image: str, checkpoints_claim: None, eventually: Any, tmp_path: Path
) -> None:
    begin = 'print(f"begins'
    script = textwrap.dedent(TRAIN).replace(begin, f'pathlib.Path("pid").write_text(str(os.getpid())); {begin}')
    (tmp_path / "train.py").write_text(script)
    options = ["--name", "train", "--replicas", "2", "--cpu", "50m", "--image", image, "--save-every", "1"]
    options += ["--store-every", "20", "--checkpoint", "checkpoints:/checkpoints", "--grace", "5s"]
    submitted = flk("submit", "train.py", *options, "--", "100000", "0.1", "0", cwd=tmp_path)
    assert submitted.code == 0, submitted.stderr

    def log() -> str:
        return str(flk("logs", "train", "--rank", "0", "--no-follow").stdout)

    def step() -> int:
        return int((re.findall(r'"step": (\d+),', log()) or ["0"])[-1])

    eventually("a step after the first stored one", lambda: step() >= 25)
    before = step()
    kubectl("exec", "train-worker-1", "--", "/bin/sh", "-c", "kill -9 $(cat /flk/work/pid)")
    eventually("the rank begins again", lambda: "from pod memory" in log())
    (memory,) = re.findall(r"resumed at step (\d+) from pod memory", log())
    assert int(memory) >= before
    eventually("the second attempt trains", lambda: step() >= int(memory) + 25)
    kubectl("delete", "pod", "train-worker-0", "train-worker-1", "--force", "--grace-period=0")
    eventually("all pods begin again", lambda: "resumed at step" in log() and "from /checkpoints" in log())
    (stored,) = re.findall(r"resumed at step (\d+) from /checkpoints\S*/step-", log())
    assert int(stored) >= (int(memory) + 25) // 20 * 20, "an older one; SIGTERM may have stored a newer one"
    assert flk("delete", "train").code == 0
