"""`--verify`: a script that trains otherwise than one process is named, and one that trains as it does is not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import user_env
from tests.support import verified
from tests.support.commands import Flk
from tests.support.pods import Pods
from tests.support.verify_cases import RIGHT, WRONG

ROOT = Path(__file__).parents[2]
WRONG_ONE = "clipping by the norm of shards"


def found(names: list[str]) -> list[tuple[str, str, bool, dict[str, str]]]:
    command = [sys.executable, "-m", verified.__name__, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_script_that_trains_otherwise_than_one_process_is_named() -> None:
    ((name, strategy, named, said),) = found([WRONG_ONE])
    assert (name, strategy) == (WRONG_ONE, "full_shard")
    assert named, said


@pytest.mark.soak
def test_no_right_script_of_the_corpus_is_refused_and_the_wrong_ones_are_named() -> None:
    results = found([])
    assert [each for each in results if each[0] in RIGHT and not each[2]] == []
    wrong = [each for each in results if each[0] in WRONG]
    print(f"{sum(each[2] for each in wrong)} of {len(wrong)} wrong ones named")
    assert sum(each[2] for each in wrong) >= 0.95 * len(wrong), [each for each in wrong if not each[2]]


def test_a_run_verifies_and_goes_on(forked_pods: Callable[..., Pods]) -> None:
    script = RIGHT["dropout"].script + "\nprint('trained', run.steps)\n"
    job = forked_pods(1, 2, script=script, **{user_env.STRATEGY: "full_shard", user_env.VERIFY: "2"})
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert "verified: 2 steps under full_shard on 2 ranks equal the whole model in one process" in job.log()
    assert "trained 4" in job.log()


@pytest.mark.soak
def test_flk_run_ends_with_the_cause(tmp_path: Path) -> None:
    flk = Flk(tmp_path)
    (tmp_path / "train.py").write_text(WRONG["a sum as the loss"].script)
    done = flk("run", "train.py", "--processes", "2", "--strategy", "full_shard", "--verify", "2")
    assert done.code == 100, done.stderr
    assert "step 1 under full_shard differs from the whole model in one process: gradient" in done.stderr
    assert "Cause: sum in place of mean" in done.stderr


def test_a_process_ends_with_the_rank_that_has_started_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    request = {"role": "whole", "steps": 1, "strategy": "ddp", "folder": str(tmp_path), "parent": 1}
    command = [sys.executable, "-m", "flk_verify", json.dumps(request), "train.py"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        assert process.wait(120) == -signal.SIGKILL
