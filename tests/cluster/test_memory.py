"""Checkpoints in memory in a cluster: which state a job has after the loss of a rank or a pod."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import user_env
from tests.support.memory import SAVES_TWICE, TRAIN, own_loop

KILLS = 8
SIZE = 64 << 20  # bytes of a shard: most of the time, one is being copied
VARIABLES = {user_env.BACKOFF: "0", user_env.RETRY_SAME_FAILURE: "1"}


@pytest.mark.soak
def test_ranks_that_are_killed_while_large_shards_are_copied_restore_from_memory(
    flk: Any, kubectl: Any, image: str, eventually: Any, tmp_path: Path
) -> None:
    """The ranks save in every step. The launchers stay, and the script asserts that no state is mixed.

    Each run of the tests kills ranks so on one machine, in tests/local, and a rank with small shards in test_faults.py.
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    options = ["--replicas", "2", "--cpu", "100m", "--image", image, "--restarts", "10"]
    options += [word for name, value in VARIABLES.items() for word in ("--env", f"{name}={value}")]
    arguments = ["1000000", "1", "0", str(SIZE)]
    submitted = flk("submit", "train.py", "--name", "large", *options, "--", *arguments, cwd=tmp_path)
    assert submitted.code == 0, submitted.stderr

    def attempts() -> list[dict[str, Any]]:
        found = json.loads(flk("status", "large", "-o", "json").stdout)
        assert found["phase"] != "Failed", found
        attempts: list[dict[str, Any]] = found["attempts"]
        return attempts

    def kill(attempt: int, rank: int) -> bool:
        """Kill a rank if it has saved in this attempt, which it tells by a file."""
        command = f'file=$(find /flk -name pid.{attempt}.{rank} 2>/dev/null); [ -s "$file" ] && kill -9 $(cat $file)'
        done = kubectl("exec", f"large-worker-{rank}", "--", "sh", "-c", f"{command} && echo killed; true")
        return "killed" in done

    def restored(attempt: int) -> bool:
        """Whether all ranks have begun to train in this attempt."""
        found = attempts()
        return len(found) > attempt and found[attempt]["restored"] is not None

    for number in range(KILLS + 1):
        eventually(f"the ranks train in attempt {number}", partial(restored, number))
        if number < KILLS:
            eventually(f"rank {number % 2} has saved in attempt {number}", partial(kill, number, number % 2))
    ended = attempts()
    assert [each["restored_from"] for each in ended] == ["start"] + ["memory"] * KILLS
    assert all(before["restored"] <= after["restored"] for before, after in itertools.pairwise(ended)), ended
    assert ended[-1]["restored"] > 0
    pods = kubectl.json("get", "pods", "-l", "flk.dev/job=large")["items"]
    assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods] == [0, 0]
    assert flk("delete", "large").code == 0


def test_saves_after_the_same_step_are_not_mixed(
    flk: Any, kubectl: Any, image: str, eventually: Any, tmp_path: Path
) -> None:
    """A script saves three times after step 1. The shard of the deleted pod is as new as that of the other one.

    The pods keep the shards on a disk: whether they are in memory makes no difference.
    """
    (tmp_path / "train.py").write_text(own_loop(SAVES_TWICE))
    options = ["--replicas", "2", "--cpu", "100m", "--image", image, "--memory-path", "/disk"]
    assert flk("submit", "train.py", "--name", "twice", *options, cwd=tmp_path).code == 0

    def log() -> str:
        return str(flk("logs", "twice", "--no-follow").stdout)

    eventually("both ranks have saved", lambda: log().count("all ranks have saved") == 2)
    kubectl("delete", "pod", "twice-worker-1")
    ended = flk("wait", "twice")
    assert ended.code == 0, ended.stderr
    found = log()
    assert re.search(r"keeps checkpoints on the disk of this pod and of pod 1: each pod uses up to .* of /disk", found)
    for rank in (0, 1):
        assert f"[rank {rank}] begins at step 1 with 3.0 3.0" in found
    assert flk("delete", "twice").code == 0


# Inductor's cache is in the pod, so a pod in the place of another one has none. Rank 1 waits in the first attempt.
