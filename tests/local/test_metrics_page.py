"""The metrics of a launcher over HTTP, from a job that runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import held_ports
from tests.support.processes import until

TRAIN = """
import time
import flk_runtime as flk
import torch
run = flk.init()
model = torch.nn.Linear(1, 1)
model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
while True:
    loss = model(torch.ones(1, 1)).sum()
    loss.backward()
    optimizer.step()
    run.step()
    time.sleep(0.02)
"""


def values(text: str) -> dict[str, float]:
    """The samples of a page by their names and labels."""
    return {m[1]: float(m[2]) for m in re.finditer(r"^(flk_\S+) (\S+)$", text, re.MULTILINE)}


@pytest.fixture
def port() -> Iterator[int]:
    with held_ports() as hold:
        yield hold()


@pytest.mark.promise("Causes: flk stacks, top, profile and metrics show a running job")
def test_a_running_job_shows_its_steps(tmp_path: Path, port: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {"PATH": "/usr/bin:/bin", "FLK_METRICS_PORT": str(port), "FLK_JOB": "gpt", "FLK_PROCESSES": "2"}
    environment |= {"FLK_NAMESPACE": "team", "FLK_POD_NAME": "gpt-worker-0", "FLK_NODE_NAME": "n1"}
    environment |= {"HF_TOKEN": "canary-7f3b"}
    base = 'namespace="team",job="gpt",pod="gpt-worker-0"'
    command = [sys.executable, "-m", "flk_runtime", "--", "train.py"]
    launcher = subprocess.Popen(
        command, cwd=tmp_path, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    try:

        def page() -> dict[str, float]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
                    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                    text = reply.read().decode()
                    assert "canary" not in text
                    return values(text)
            except urllib.error.URLError:
                return {}

        last = f'flk_step{{{base},rank="1",node="n1"}}'
        until(lambda: page().get(last, 0) > 3, "the second rank has done steps", seconds=120, every=0.2)
        found = page()
        assert found[f"flk_making_progress{{{base}}}"] == 1
        assert found[f"flk_attempts_total{{{base}}}"] == 1
        assert found[f"flk_restarts_total{{{base}}}"] == 0
        assert 0 < found[f"flk_goodput_ratio{{{base}}}"] < 1
        assert found[f'flk_time_seconds{{{base},cause="starting"}}'] > 0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)
