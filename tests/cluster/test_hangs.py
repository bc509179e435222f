"""Ranks that hang and slow ones on a cluster: what `status`, `why` and `stacks` say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import status

SMALL = ["--cpu", "100m"]
SCRIPT = """
    import os, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def fetch():
        {fault}

    for step in range(1_000_000):
        if rank == 2 and step >= {begin}:
            fetch()
        time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
"""


def submit(flk: Any, image: str, folder: Path, name: str, *args: str) -> None:
    words = ["--name", name, "--replicas", "2", "--processes", "2", "--restarts", "0", "--image", image, *SMALL]
    result = flk("submit", "train.py", *words, *args, cwd=folder)
    assert result.code == 0, result.stderr


def in_fetch(stacks: Any) -> str:
    """The output of `flk stacks` if it shows a rank in fetch, else an empty string."""
    assert stacks.code == 0, stacks.stderr
    return str(stacks.stdout) if "train.py:9 in fetch" in stacks.stdout else ""


ASLEEP = """
    import os, time
    time.sleep(10_000) if os.environ["RANK"] == "0" else None
    import torch.distributed as dist
    dist.init_process_group("gloo")
"""


@pytest.mark.promise("Causes: flk stacks, top, profile and metrics show a running job")
@pytest.mark.soak
def test_stacks_and_slow_ranks_of_a_running_job(flk: Any, image: str, script: Any, eventually: Any) -> None:
    submit(flk, image, script(ASLEEP), "asleep", "--processes", "1")
    folder = script(SCRIPT.format(fault="time.sleep(0.06)", begin=0))
    submit(flk, image, folder, "slow", "--env", "FLK_SLOW_WINDOW=15")
    eventually("all ranks run", lambda: flk("status", "slow", "-o", "json").stdout.count('"running"'))
    found = eventually("stacks", lambda: json.loads(flk("stacks", "slow", "-o", "json").stdout or "{}").get("groups"))
    assert sorted(rank for group in found for rank in group["ranks"]) == [0, 1, 2, 3]
    # Rank 2 shares its stack with others in the moments in which it is not in fetch.
    text = eventually("rank 2 is in fetch", lambda: in_fetch(flk("stacks", "slow", "--rank", "2")))
    assert "rank 2 in slow-worker-1 on " in text
    eventually("rank 2 is slow", lambda: status(flk, "slow")["slow"])
    slow = status(flk, "slow")["slow"]
    assert [(each["rank"], each["pod_name"]) for each in slow] == [(2, "slow-worker-1")]
    assert "rank 2 in slow-worker-1 on " in flk("status", "slow").stdout
    assert status(flk, "slow")["phase"] == "Running"
    # Meanwhile nothing goes on in the other job.
    eventually("all wait", lambda: status(flk, "asleep")["reason"])
    said = json.loads(flk("why", "asleep", "-o", "json").stdout)
    stands = "rank 0 did not reach init_process_group; it is at train.py:3"
    assert said["summary"] == f"no rank makes progress: {stands}"
    assert stands in flk("status", "asleep").stdout
    assert (status(flk, "asleep")["phase"], status(flk, "asleep")["attempts"][-1]["number"]) == ("Running", 1)
