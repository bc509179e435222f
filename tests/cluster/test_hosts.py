"""Trainings of other packages in pods, whose state flk keeps: a killed rank, then a pod that is gone."""

from __future__ import annotations

import json
import re
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import torchtitan_cpu
from tests.support import hosted

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500, func_only=True)]

# The script, the packages that it needs, its arguments, the number that it prints at its end, and the last step that is
# saved when the pod is lost.
TRAININGS = {
    "transformers": (hosted.TRANSFORMERS, ("transformers", "accelerate"), ("dies",), 9, 6),
    "lightning": (hosted.LIGHTNING, ("lightning",), ("dies", "distributed"), 24, 6),
    "accelerate": (hosted.ACCELERATE, ("accelerate",), ("dies",), 21, 3),
}
GONE = "print('waits for its end', flush=True), time.sleep(600)"


@pytest.mark.parametrize("package", TRAININGS)
def test_after_a_killed_rank_and_a_lost_pod_it_trains_as_without_them(
    flk: Any, kubectl: Any, image: str, eventually: Any, tmp_path: Path, package: str
) -> None:
    script, packages, arguments, compared, saved = TRAININGS[package]
    assert hosted.KILLED in script
    # In the second attempt the rank that would die waits, so that its pod is deleted at that step.
    script = script.replace(hosted.KILLED, f"{hosted.KILLED} if ATTEMPT == 0 else ({GONE})")
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    for each in packages:
        pytest.importorskip(each)
    pip = [option for each in packages for option in ("--pip", f"{each}=={metadata.version(each)}")]
    options = ("--name", "hosted", "--replicas", "2", "--image", image, "--cpu", "100m", "--restarts", "2", *pip)
    offline = ("--env", "HF_HUB_OFFLINE=1")
    submitted = flk("submit", "train.py", *options, *offline, "--", *arguments, cwd=tmp_path)
    assert submitted.code == 0, submitted.stderr
    eventually(
        "rank 1 waits in the second attempt",
        lambda: "waits for its end" in flk("logs", "hosted", "--no-follow").stdout,
    )
    # Without a notice, so that nothing is saved: its checkpoint is in the memory of the other pod.
    kubectl("delete", "pod", "hosted-worker-1", "--force", "--grace-period=0")
    ended = flk("wait", "hosted", timeout=600)
    assert ended.code == 0, ended.stderr
    attempts = json.loads(flk("status", "hosted", "-o", "json").stdout)["attempts"]
    assert [each["restored_from"] for each in attempts[1:]] == ["memory", "memory"]
    log = flk("logs", "hosted", "--no-follow").stdout
    assert f"[rank 0] equal {compared}" in log
    assert f"resumed at step {saved} from pod memory" in log


# One rank in each pod, whose losses are printed. With "disturbed", rank 1 waits in step 3 of the first attempt.
TORCHTITAN = """
    import os, pathlib, runpy, sys, time

    import torchtitan_cpu

    torchtitan_cpu.replace_gpu()
    from torchtitan import trainer
    from torchtitan.components.metrics import MetricsProcessor

    if not pathlib.Path("assets").exists():
        torchtitan_cpu.assets(pathlib.Path("assets"))
    disturbed, step, log = sys.argv.pop(1) == "disturbed", trainer.Trainer.train_step, MetricsProcessor.log
    def train_step(self, *arguments):
        step(self, *arguments)
        if disturbed and (self.step, os.environ["FLK_ATTEMPT"], os.environ["RANK"]) == (3, "0", "1"):
            print("waits for its end", flush=True)
            time.sleep(600)
    trainer.Trainer.train_step = train_step
    def logged(self, step, loss, *more, **named):
        print(f"step {step} has loss {loss!r}", flush=True)
        log(self, step, loss, *more, **named)
    MetricsProcessor.log = logged
    runpy.run_module("flk_hosts.torchtitan", run_name="__main__")
"""


def test_torchtitan_trains_after_a_lost_pod_as_without_it(
    flk: Any, kubectl: Any, image: str, eventually: Any, tmp_path: Path
) -> None:
    pytest.importorskip("torchtitan")
    (tmp_path / "train.py").write_text(textwrap.dedent(TORCHTITAN))
    (tmp_path / "torchtitan_cpu.py").write_text(Path(torchtitan_cpu.__file__).read_text())
    options = ["--replicas", "2", "--image", image, "--cpu", "100m", "--restarts", "1", "--env", "FLK_SAVE_EVERY=1"]
    options += ["--pip", f"torchtitan=={metadata.version('torchtitan')}"]
    options += [word for pair in torchtitan_cpu.VARIABLES.items() for word in ("--env", "=".join(pair))]
    losses = []
    for name in ("plain", "disturbed"):
        arguments = (name, *torchtitan_cpu.arguments(Path("assets"), 5))
        submitted = flk("submit", "train.py", "--name", name, *options, "--", *arguments, cwd=tmp_path)
        assert submitted.code == 0, submitted.stderr
        if name == "disturbed":
            eventually("rank 1 waits", lambda: "waits for its end" in flk("logs", "disturbed", "--no-follow").stdout)
            kubectl("delete", "pod", "disturbed-worker-1", "--force", "--grace-period=0")
        ended = flk("wait", name, timeout=600)
        assert ended.code == 0, ended.stderr
        log = flk("logs", name, "--no-follow").stdout
        losses.append(dict(re.findall(r"\[rank 0\] step (\d+) has loss (\S+)", log)))
    assert "resumed at step 2 from pod memory" in log
    assert set(losses[0]) == {"1", "2", "3", "4", "5"}
    assert losses[0] == losses[1]
