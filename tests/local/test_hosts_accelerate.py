"""A loop with an Accelerator whose state flk keeps: it resumes exactly, and saves before a pod goes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import user_env
from tests.support import adapters, hosted, hosted_programs
from tests.support.collection import skip_without
from tests.support.pods import Pods

skip_without("accelerate")


@pytest.mark.promise("Extensions: Transformers, Lightning and Accelerate resume at the exact sample")
def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path, tmp_path: Path
) -> None:
    job = adapters.start(forked_pods, root, hosted.ACCELERATE, 3, "dies", "tail", **adapters.metrics_of(tmp_path))
    assert job.wait() == [0, 0], job.logs_of_all()
    assert re.findall(r"resumed at step (\d+) from pod memory", job.log(0)) == ["1", "3", "5"]
    assert all("equal 21" in job.log(pod) for pod in job.running)
    lines = [json.loads(line) for line in re.findall(r"\[rank 0\] (\{\"step.*\})", job.log(0))]
    assert [line["step"] for line in lines] == [3, 6, 6, 9]  # rank 1 died after step 6, before the next epoch
    adapters.assert_curve(job, [3, 6, 9])


@pytest.mark.soak
def test_trainings_of_one_process_go_on_each_from_its_own_place(forked_pods: Callable[..., Pods], root: Path) -> None:
    job = adapters.start(forked_pods, root, hosted_programs.ACCELERATE, 4, **{user_env.BACKOFF: "0"})
    assert job.wait() == [0, 0], job.logs_of_all()
    assert all("equal 4" in job.log(pod) for pod in job.running)
    assert all("again True" in job.log(pod) for pod in job.running)
