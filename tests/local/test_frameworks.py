"""Scripts that know nothing of flk, plain or of a framework, train together under `flk run` as under torchrun."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

pytestmark = pytest.mark.soak  # test_run.py starts a plain script under `flk run` every time
EXAMPLES = Path(__file__).parents[2] / "examples"
FLK = ("-m", "flk", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NEEDS = {
    "nanogpt": [],
    "lightning": ["lightning"],
    "accelerate": ["accelerate"],
    "transformers": ["transformers", "accelerate"],
}


def of(*examples: str) -> list[Any]:
    """The examples as parameters. One worker runs all tests of an example, or each would start it anew."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.xdist_group(f"example {name}"),
            id=name,
        )
        for name in examples
    ]


def under_flk(example: str) -> list[dict[str, Any]]:
    """What the ranks of `flk run` say: two pods of the plain script, which imports least, and one pod of others."""
    return start((*FLK, "--replicas" if example == "nanogpt" else "--processes", "2"), example)


@functools.cache  # a start takes seconds, and each is looked at from two or three sides
def start(launcher: tuple[str, ...], example: str) -> list[dict[str, Any]]:
    """What each rank says of itself at its end, in the order of ranks."""
    for package in NEEDS[example]:
        if not importlib.util.find_spec(package):
            pytest.skip(f"needs the package {package}")
    strange = ("FLK_", "TORCHELASTIC_", "PET_", "ACCELERATE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / example / "train.py")]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(command, cwd=folder, env=clean | offline, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return results(ended.stdout.splitlines())


def results(printed: Iterable[str]) -> list[dict[str, Any]]:
    """What each rank says of itself at its end, in the order of ranks, from the lines of all ranks."""
    lines = [line[line.find("{") :] for line in printed if '{"rank": ' in line]
    return sorted((json.loads(line) for line in lines), key=lambda result: result["rank"])


@pytest.mark.promise("Jobs: A script for torchrun runs unchanged, on this machine and in a cluster")
@pytest.mark.parametrize("example", of(*NEEDS))
def test_two_ranks_train_one_model(example: str) -> None:
    first, second = under_flk(example)
    assert first["world_size"] == 2
    assert {**first, "rank": 1} == second  # the loss and the norm of all parameters to the last bit
    if example == "lightning":
        assert first["started_by"] == "TorchElasticEnvironment"


@pytest.mark.xdist_group("example nanogpt")
def test_with_torchruns_variables_and_in_one_process_it_trains_the_same(ranks: Ranks) -> None:
    """The ranks are forks of a process with torch. The next test starts torchrun itself."""
    script = (EXAMPLES / "nanogpt" / "train.py").read_text()
    of_flk = under_flk("nanogpt")
    assert results(line for rank in ranks(script, 2) for line in rank.lines) == of_flk
    assert_same_training(results(ranks(script, 1)[0].lines), of_flk)


@pytest.mark.parametrize("example", of(*NEEDS))
def test_under_torchrun_it_trains_the_same(example: str) -> None:
    assert start(TORCHRUN, example) == under_flk(example)


def assert_same_training(of_one: list[dict[str, Any]], of_two: list[dict[str, Any]]) -> None:
    (alone,), (first, _) = of_one, of_two
    assert (alone["world_size"], first["world_size"]) == (1, 2)
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert first["norm"] == pytest.approx(alone["norm"], rel=1e-5)
