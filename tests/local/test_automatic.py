"""Strategy auto in real runs: what the ranks choose, that they keep it, and what happens where they cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support.pods import Pods

SCRIPT = """
import os, sys, torch, flk_runtime as flk
from torch import nn

with flk.init() as run:
    block = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    model = nn.Sequential(*(block() for _ in range(4)))
    if "no-plan" in sys.argv and os.environ.get("FLK_TRIAL"):
        raise ValueError("the data is not here")
    print(f"trains with {run.strategy}")
    model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
    for x in run.loader(torch.randn(64, 16), batch_size=8).steps(2):
        model(x).square().mean().backward()
        optimizer.step()
        run.step()
        if "fail" in sys.argv and run.attempt == 0 and run.rank == 1:
            sys.exit("once")
"""


@pytest.mark.promise("Planning: Strategy auto chooses by the plan, and keeps its choice")
def test_ranks_choose_a_strategy_and_keep_it_over_attempts(forked_pods: Callable[..., Pods]) -> None:
    job = forked_pods(1, 2, SCRIPT, **{user_env.STRATEGY: "auto", pod_env.RESTARTS: "1"})
    job.start("train.py", "fail")
    assert job.wait() == [0], job.log()
    chosen = [line.partition("] ")[2] for line in job.log().splitlines() if "chosen by auto" in line]
    assert len(chosen) == 2
    assert chosen[0] == chosen[1]  # to the digit: the second attempt has made no plan
    assert "(predicted)" in chosen[0]
    strategy = chosen[0].split()[2].rstrip(",")
    assert job.log().count(f"trains with {strategy}") == 4


@pytest.mark.soak
def test_a_script_that_cannot_be_planned_trains_with_full_shard(forked_pods: Callable[..., Pods]) -> None:
    job = forked_pods(1, 2, SCRIPT, **{user_env.STRATEGY: "auto"})
    job.start("train.py", "no-plan")
    assert job.wait() == [0], job.log()
    assert "flk: strategy full_shard, chosen by auto: it needs least memory, and there is no plan, because" in job.log()
    assert "ValueError: the data is not here; set another with --strategy" in job.log()
    assert job.log().count("trains with full_shard") == 2
