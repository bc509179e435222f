"""`flk top` on a terminal and `flk profile`, of a job that trains in a real cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.terminal import on_a_terminal

TRAIN = """
import os, pathlib, signal, time
import flk_runtime as flk
import torch
run = flk.init(log_every=5)
model = torch.nn.Linear(64, 1)
model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(run.steps, 100_000):
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    run.step(loss=loss, total=100_000)
    if run.rank == 1 and pathlib.Path("/tmp/die").exists():
        pathlib.Path("/tmp/die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_is_watched_and_profiled(flk: Any, image: str, tmp_path: Path, eventually: Any) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    args = ["--name", "gpt", "--replicas", "2", "--image", image, "--cpu", "50m", "--memory", "1Gi", "--restarts", "2"]
    made = flk("submit", "train.py", *args, "--strategy", "ddp", cwd=tmp_path)
    assert made.code == 0, made.stderr

    def steps() -> list[int]:
        data = json.loads(flk("top", "gpt", "-o", "json").stdout)
        return [rank["step"] for rank in (data["telemetry"] or {}).get("ranks", [])]

    eventually("the ranks tell their steps", lambda: len(steps()) == 2 and min(steps()) > 0)

    done = flk("profile", "gpt", "--rank", "all", "--steps", "5", "-o", "json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    for rank in json.loads(done.stdout)["ranks"]:
        assert (tmp_path / f"gpt-rank{rank['rank']}.json.gz").stat().st_size > 1000
        assert rank["summary"]["steps"] == 5
        assert rank["summary"]["communication"] > 0
    none = flk("profile", "gpt", "--memory", cwd=tmp_path)
    assert (none.code, none.stderr.splitlines()[-1]) == (
        2,
        "error: --memory: rank 0 has no CUDA GPU, and torch keeps no history of other memory",
    )
    left = flk("exec", "gpt", "--", "sh", "-c", "find /tmp -name 'profile-*'").stdout
    assert left == ""

    assert flk("exec", "gpt", "--rank", "1", "--", "touch", "/tmp/die").code == 0
    view = [*flk.program, "top", "gpt"]
    # The attempt may have begun before the view: then it is shown at once. The steps of the ranks go on.
    two_steps = re.compile(r"step ([\d,]+) of 100,000.*step (?!\1 )[\d,]+ of 100,000", re.DOTALL)
    typed: dict[str | re.Pattern[str], str] = {"attempt 2 began": "", two_steps: "q"}
    code, shown = on_a_terminal(view, tmp_path, environment=flk.env, typed=typed, size=(30, 100))
    assert code == 0, shown
    assert "rank 1 in gpt-worker-1 was killed by SIGKILL" in shown
    assert "\x1b[?25h\x1b[?1049l" in shown
