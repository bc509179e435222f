"""`flk bench` in a cluster: it measures in the pods of one job, which is gone at the end.

`tests/local/test_bench.py` measures the other strategies.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.benchmark import SCRIPT


@pytest.mark.promise("Planning: flk bench measures each strategy in the same pods")
@pytest.mark.soak
def test_strategies_are_measured_in_the_pods_of_one_job(flk: Any, kubectl: Any, image: str) -> None:
    (flk.folder / "train.py").write_text(SCRIPT)
    done = flk(
        *("bench", "train.py", "--replicas", "2", "--cpu", "100m", "--steps", "3", "--strategies", "ddp"),
        *("--strategy-timeout", "200s", "-o", "json"),
        timeout=550,
    )
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["strategies"]) == {"ddp"}
    assert all(each["seconds"] > 0 and len(each["memory"]) == 2 for each in result["strategies"].values())
    jobs = kubectl.json("get", "pytorchjobs")["items"]
    assert [each for each in jobs if "deletionTimestamp" not in each["metadata"]] == []
