"""Loops of other packages on a GPU, kept by flk: after two kills they have computed what they compute undisturbed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env
from tests.support import hosted
from tests.support.gpu import Launch, restarts

# By package: the script, what makes it one of a rank on a GPU, and the arguments that have the rank die.
SCRIPTS = {
    "transformers": (hosted.TRANSFORMERS, {"use_cpu=True": "use_cpu=False"}, ["dies"]),
    "lightning": (hosted.LIGHTNING, {'"cpu"': '"gpu"', "num_nodes=2": "num_nodes=1"}, ["dies", "distributed"]),
    "accelerate": (hosted.ACCELERATE, {"Accelerator(cpu=True, ": "Accelerator("}, ["dies"]),
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "DISABLE_KUBEFLOW_INTEGRATION": "TRUE"}


@pytest.mark.parametrize("package", SCRIPTS)
def test_after_two_kills_the_training_is_the_undisturbed_one(
    launch: Launch, tmp_path: Path, root: Path, package: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    script, changes, arguments = SCRIPTS[package]
    for before, after in {**changes, "RANK == 1": "RANK == 0"}.items():
        assert before in script
        script = script.replace(before, after)
    begin = f"""
        import sys
        from torch.optim.optimizer import register_optimizer_step_post_hook

        sys.argv[1:] = {arguments}
        torch.use_deterministic_algorithms(True, warn_only=True)
        devices = set()
        register_optimizer_step_post_hook(
            lambda optimizer, *_: devices.add(optimizer.param_groups[0]["params"][0].device.type)
        )
    """
    variables = {**restarts(tmp_path, memory=root), **OFFLINE, pod_env.RESTARTS: "2"}
    ended = launch(begin, script, "assert devices == {'cuda'}\n", **variables)
    assert re.search(r"equal \d+", ended.stdout), ended.stdout + ended.stderr
    assert len(re.findall(r"resumed at step \d+ from pod memory", ended.stdout)) == 2, ended.stdout + ended.stderr
