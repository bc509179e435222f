"""`flk top` on a terminal, `flk profile` and `flk report`, of jobs that train in a real cluster."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Kubectl
from tests.support.terminal import on_a_terminal

TRAIN = """
import os, pathlib, signal, sys, time
import flk_runtime as flk
import torch
run = flk.init(log_every=5)
token = os.environ.get("HF_TOKEN", "none")
secrets = f"{token}, {os.environ.get('API_KEY')} and postgres://me:{token[::-1]}@db/runs"
run.print("logged in with", secrets)
print("logged in with", secrets, file=sys.stderr)
run.log_hyperparameters(token=token)
run.log(told=secrets)
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
    if run.rank == 1 and pathlib.Path("/tmp/fail").exists():
        raise ValueError(f"expected 512 features, got 511, with {secrets}")
"""
CAUSE = "expected 512 features, got 511"
SECRET = "canary-7f3b"  # of a Secret
CANARIES = (SECRET, "canary-of-env", SECRET[::-1])  # as the script prints them; the last one is in no variable
HIDDEN = "***, *** and postgres://me:***@db/runs"
PAGE = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9400/metrics').read().decode())"


def assert_no_secrets(texts: dict[str, str]) -> None:
    """Assert that none of ``texts`` is empty or has a secret of the script."""
    for name, text in texts.items():
        assert text, name
        assert [each for each in CANARIES if each in text] == [], f"{name}: {text}"


@pytest.mark.promise("Clusters: No secret is printed, logged or kept")
def test_a_job_is_watched_and_profiled_and_its_secrets_are_nowhere(
    flk: Any, kubectl: Kubectl, image: str, tmp_path: Path, eventually: Any
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    kubectl("create", "secret", "generic", "keys", f"--from-literal=token={SECRET}")
    args = ["--name", "gpt", "--replicas", "2", "--image", image, "--cpu", "50m", "--memory", "1Gi", "--restarts", "1"]
    args += ["--secret", "HF_TOKEN=keys:token", "--env", "API_KEY=canary-of-env", "--env", "FLK_METRICS_PORT=9400"]
    made = flk("submit", "train.py", *args, "--strategy", "ddp", cwd=tmp_path)
    assert made.code == 0, made.stderr

    def steps() -> list[int]:
        shown = re.findall(r"^[> ] +\d+ +([\d,]+) ", flk("top", "gpt").stdout, re.MULTILINE)
        return [int(step.replace(",", "")) for step in shown]

    eventually("the ranks tell their steps", lambda: len(steps()) == 2 and min(steps()) > 0)

    done = flk("profile", "gpt", "--rank", "all", "--steps", "5", cwd=tmp_path)
    assert done.code == 0, done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"gpt-rank{rank}.pt.trace.json.gz").stat().st_size > 1000
    metrics = flk("exec", "gpt", "--", "python", "-c", PAGE).stdout
    left = flk("exec", "gpt", "--", "sh", "-c", "find /tmp -name 'profile-*'").stdout
    assert left == ""

    assert flk("exec", "gpt", "--rank", "1", "--", "touch", "/tmp/die").code == 0
    view = [*flk.program, "top", "gpt"]
    # The attempt may have begun before the view: then it is shown at once. The steps of the ranks go on.
    two_steps = re.compile(r"step (\S+) of 100,000.*step (?!\1 )\S+ of 100,000", re.DOTALL)
    typed: dict[str | re.Pattern[str], str] = {"attempt 2": "", two_steps: "q"}
    code, shown = on_a_terminal(view, tmp_path, environment=flk.env, typed=typed, size=(30, 100))
    assert code == 0, shown
    assert "rank 1 in gpt-worker-1 was killed by SIGKILL" in flk("status", "gpt").stdout
    assert "\x1b[?25h\x1b[?1049l" in shown

    assert flk("exec", "gpt", "--rank", "1", "--", "touch", "/tmp/fail").code == 0
    eventually("flk says why the job has failed", lambda: CAUSE in flk("why", "gpt", "-o", "json").stdout)

    texts = {"profile": done.stdout, "metrics": metrics, "top on a terminal": shown}
    read = ("logs gpt", "top gpt", *(f"{each} -o json" for each in ("why gpt", "status gpt", "list")))
    texts |= {command: flk(*command.split()).stdout for command in read}
    assert f"logged in with {HIDDEN}" in texts["logs gpt"]
    assert f"{CAUSE}, with {HIDDEN}" in texts["why gpt -o json"]
    assert flk("report", "gpt", cwd=tmp_path).code == 0
    files = [*tmp_path.glob("*.html"), *tmp_path.glob("*.json.gz"), *Path(flk.env["HOME"]).rglob("*.json.gz")]
    for file in files:
        content = file.read_bytes()
        texts[str(file)] = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    assert len(files) >= 4, "a report, two profiles, and the archive on this machine"
    texts |= {f"log of {pod}": kubectl("logs", pod, "-c", "pytorch") for pod in ("gpt-worker-0", "gpt-worker-1")}
    texts["records"] = kubectl("get", "configmaps", "-o", "yaml")
    texts["termination messages"] = kubectl("get", "pods", "-o", "jsonpath={.items[*].status}")
    assert_no_secrets(texts)
