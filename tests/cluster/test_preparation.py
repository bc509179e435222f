"""What jobs name for their pods, in a real cluster: packages, a setup command, volumes, limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.wheels import wheel

SCRIPT = """
import os
import flkdemo
import flk_runtime as flk

with flk.init() as run:
    if run.attempt == 0:
        raise ValueError("once")
    flkdemo.main()
    print(open("/settings/rate").read(), open("/keys/token").read(), open("prepared").read(), flush=True)
"""
NEEDS = ("--volume", "configmap:settings:/settings", "--volume", "secret:keys:/keys", "--memory", "500Mi")
LIMITS = ("--memory-limit", "1Gi", "--cpu-limit", "2", "--ephemeral-storage", "500Mi")


@pytest.mark.promise("Jobs: Packages and a setup command are there before the ranks start")
def test_packages_and_a_setup_command(flk: Any, kubectl: Any, image: str, tmp_path: Path, eventually: Any) -> None:
    """The job has what it needs, also in its second attempt."""
    wheel(tmp_path, "torch")
    (tmp_path / "requirements.txt").write_text("--no-index\n--find-links .\nflkdemo\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    kubectl("create", "configmap", "settings", "--from-literal=rate=0.25")
    kubectl("create", "secret", "generic", "keys", "--from-literal=token=hidden")
    small = ("--image", image, "--cpu", "50m", "--ship", "*.whl")
    setup = "echo waits; while ! test -e /tmp/go; do sleep 0.2; done; echo -n done > prepared"
    packages = ("--requirements", "requirements.txt", "--setup", setup)
    made = flk("submit", "train.py", "--name", "good", *small, *NEEDS, *LIMITS, *packages, cwd=tmp_path)
    assert made.code == 0, made.stderr

    state = eventually(
        "the setup command runs",
        lambda: (s := json.loads(flk("status", "good", "-o", "json").stdout))["message"].endswith("waits") and s,
    )
    assert (state["phase"], state["reason"]) == ("Starting", "Preparing")
    assert "good-worker-0 runs the setup command for " in state["message"]
    touch = (
        "import flkdemo, pathlib; pathlib.Path('/tmp/go').touch()"  # the packages are there, and beside the ranks too
    )
    said = flk("exec", "good", "--", "python3", "-c", touch)
    assert said.code == 0, said.stderr

    assert flk("wait", "good").code == 0
    lines = kubectl("logs", "good-worker-0").splitlines()
    assert sum(line.startswith("[pod 0] installing packages") for line in lines) == 1
    assert any(line.startswith("[rank 0] ") and line.endswith("site-packages/torch/__init__.py") for line in lines)
    assert "[rank 0] 0.25 hidden done" in lines
