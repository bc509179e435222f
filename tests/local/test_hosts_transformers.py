"""A Trainer of Transformers whose state flk keeps (flk_hosts.transformers): it resumes exactly, and saves."""

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

skip_without("transformers")

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",  # of the other trainer, whose reports are lines too
}


@pytest.mark.promise("Extensions: Transformers, Lightning and Accelerate resume at the exact sample")
def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    job = adapters.start(forked_pods, root, hosted.TRANSFORMERS, 2, "dies", "theirs", **OFFLINE)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert re.findall(r"resumed at step (\d+) from pod memory", job.log(0)) == ["3", "6"]
    assert all("equal 9" in job.log(pod) for pod in job.running)
    assert all("went on from theirs" in job.log(pod) for pod in job.running)
    lines = [json.loads(line) for line in re.findall(r"\[rank 0\] (\{\"step.*\})", job.log(0).partition("equal")[0])]
    assert [(line["step"], line["total_steps"]) for line in lines] == [(3, 12), (6, 12), (9, 12), (12, 12)]
    assert all(line["samples_per_s"] > 0 and line["tokens_per_s"] > 0 and line["eval_loss"] > 0 for line in lines)


@pytest.mark.soak
def test_all_ranks_save_after_the_same_step_when_a_pod_must_go(forked_pods: Callable[..., Pods], root: Path) -> None:
    job = adapters.start(forked_pods, root, hosted.TRANSFORMERS, 0, "waits", **OFFLINE)
    paths = [job.folder / f"step.0.{rank}" for rank in (0, 1)]
    job.until(lambda: all(path.exists() and path.read_text() >= "2" for path in paths), "both ranks count steps")
    adapters.ends_saved(job)


@pytest.mark.soak
@pytest.mark.parametrize("programs", ["0 4", "1 2 3", "5 6", "7 8"])
def test_trainings_of_one_process_go_on_each_from_its_own_place(
    forked_pods: Callable[..., Pods], root: Path, programs: str
) -> None:
    numbers = programs.split()
    variables = {user_env.BACKOFF: "0", **OFFLINE}
    job = adapters.start(forked_pods, root, hosted_programs.TRANSFORMERS, len(numbers), *numbers, **variables)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert all(f"equal {len(numbers)}" in job.log(pod) for pod in job.running)
