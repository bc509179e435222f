"""A script that uses nothing of flk: its steps are its progress."""

from __future__ import annotations

import re
from collections.abc import Callable

from flk_runtime.contract import pod_env
from tests.support.pods import Pods

TRAIN = """
    import torch
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    for step in range(5):
        weight.grad = torch.ones(2)
        optimizer.step()
    raise ArithmeticError("the loss is not finite")
"""


def test_the_same_failure_after_the_same_step_is_not_retried_for_ever(forked_pods: Callable[..., Pods]) -> None:
    job = forked_pods(1, 1, script=TRAIN, **{pod_env.RESTARTS: "9"})
    job.start("train.py")
    assert job.wait() == [100], job.logs_of_all()
    said = re.findall(r"attempt \d+ began at step 0 again; .*", job.log())
    assert said == ["attempt 2 began at step 0 again; step 5 had been reached before"]
    record = job.record()
    assert [(each.step, each.restored, each.restored_from) for each in record.attempts] == [(5, 0, "start")] * 2
    assert record.no_retry_reason == "not retried: failed twice at step 5 with the same error"
    assert record.goodput is not None
    assert record.goodput.seconds["lost"] > 0, "the steps of a script that saves nothing"
