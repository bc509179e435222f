"""`--verify`: a script that trains otherwise than one process is named, and one that trains as it does is not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import user_env
from tests.support.commands import Flk
from tests.support.pods import Pods
from tests.support.verify_cases import RIGHT, WRONG

ONES = ["Muon, which computes in bfloat16", "clipping by the norm of shards"]  # a right one and a wrong one


# It calls verified.main in a process that is forked from one with torch, and forks the ranks.
FOUND = """
from tests.support import verified
with open(path, "w") as output:
    verified.main(names, output)
"""


def found(fork_server: ForkServerContext, folder: Path, names: list[str]) -> list[Any]:
    arguments = {"path": str(folder / "found"), "names": names}
    process = fork_server.Process(target=exec, args=(FOUND, arguments))
    process.start()
    process.join()
    assert process.exitcode == 0
    return [json.loads(line) for line in (folder / "found").read_text().splitlines()]


def test_a_script_that_trains_otherwise_than_one_process_is_named(
    fork_server: ForkServerContext, tmp_path: Path
) -> None:
    results = found(fork_server, tmp_path, ONES)
    assert [each[:3] for each in results] == [[name, "full_shard", True] for name in ONES], results


@pytest.mark.soak
def test_no_right_script_of_the_corpus_is_refused_and_the_wrong_ones_are_named(
    fork_server: ForkServerContext, tmp_path: Path
) -> None:
    results = found(fork_server, tmp_path, [])
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
