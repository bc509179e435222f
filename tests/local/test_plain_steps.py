"""A script that uses nothing of flk: its steps and what it tells Kubeflow Trainer are its progress."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from flk_runtime.contract import pod_env
from tests.support.pods import Pods
from tests.support.status_server import StatusServer

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


# What the clients of Kubeflow Trainer do, such as that of Transformers: rank 0 alone posts.
POSTS = """
    import json, os, ssl, urllib.request

    if os.environ["RANK"] == "0":
        metrics = [{"name": "current_step", "value": "4"}, {"name": "total_steps", "value": "10"}]
        status = {"progressPercentage": 40, "estimatedRemainingSeconds": 90, "metrics": metrics}
        with open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]) as file:
            headers = {"Authorization": f"Bearer {file.read().strip()}"}
        url, authority = os.environ["KUBEFLOW_TRAINER_SERVER_URL"], os.environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
        request = urllib.request.Request(url, json.dumps({"trainerStatus": status}).encode(), headers, method="POST")
        context = ssl.create_default_context(cafile=authority) if authority else None
        with urllib.request.urlopen(request, context=context) as answer:
            print("answered", answer.status)
"""


def test_what_a_script_posts_is_its_progress_here_and_in_its_trainjob(
    forked_pods: Callable[..., Pods], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of the pod")
    with StatusServer() as trainer:
        variables = {pod_env.TRAINER_URL: trainer.url, pod_env.TRAINER_TOKEN: str(tmp_path / "token")}
        job = forked_pods(1, 2, script=POSTS, **variables)
        job.start("train.py")
        assert job.wait() == [0], job.log()
    assert "[rank 0] answered 200" in job.log()
    (line,) = re.findall(r"\[rank 0\] (\{.*\})", job.log())
    assert json.loads(line) == {"step": 4, "total_steps": 10, "progress": 40, "eta_s": 90}
    ((authorization, status),) = trainer.got
    assert authorization == "Bearer of the pod", "the script has a token of the launcher's own"
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (40, 90)
