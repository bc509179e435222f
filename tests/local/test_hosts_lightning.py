"""A Lightning Trainer whose state flk keeps (flk_hosts.lightning): it resumes exactly, and saves in time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import user_env
from tests.support import adapters, hosted, hosted_programs
from tests.support.collection import often, skip_without
from tests.support.pods import Pods

skip_without("lightning")


THEIRS = {"distributed": ["theirs"], "random": []}  # arguments of the script, by its sampler


@pytest.mark.promise("Extensions: Transformers, Lightning and Accelerate resume at the exact sample")
@pytest.mark.parametrize("sampler", often((0,), THEIRS))
def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path, tmp_path: Path, sampler: str
) -> None:
    words = ("dies", sampler, *THEIRS[sampler])
    job = adapters.start(forked_pods, root, hosted.LIGHTNING, 2, *words, **adapters.metrics_of(tmp_path))
    assert job.wait() == [0, 0], job.logs_of_all()
    assert re.findall(r"resumed at step (\d+) from pod memory", job.log(0)) == ["3", "6"]
    assert all("equal 24" in job.log(pod) for pod in job.running)
    assert all(("went on from theirs" in job.log(pod)) == bool(THEIRS[sampler]) for pod in job.running)
    lines = [json.loads(line) for line in re.findall(r"\[rank 0\] (\{\"step.*\})", job.log(0))]
    assert [(line["step"], line["total_steps"]) for line in lines] == [(3, 12), (6, 12), (9, 12), (12, 12)]
    assert all(line["samples_per_s"] > 0 and line["loss"] > 0 for line in lines)
    adapters.assert_curve(job, [3, 6, 9, 12])


@pytest.mark.soak
@pytest.mark.parametrize("programs", ["0 2", "1 3", "4 6", "5", "7 8 9"])
def test_trainings_of_one_process_go_on_each_from_its_own_place(
    forked_pods: Callable[..., Pods], root: Path, programs: str
) -> None:
    numbers = programs.split()
    job = adapters.start(
        forked_pods, root, hosted_programs.LIGHTNING, len(numbers), *numbers, **{user_env.BACKOFF: "0"}
    )
    assert job.wait() == [0, 0], job.logs_of_all()
    assert all(f"equal {len(numbers)}" in job.log(pod) for pod in job.running)
