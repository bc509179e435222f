"""What an elastic job may have of ranks, and what it cannot train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flk_runtime import per_rank
from flk_runtime.checkpoint.adapters.adapt import adapt
from flk_runtime.contract import pod_env, user_env
from flk_runtime.errors import SetupError
from flk_runtime.training.elastic import numbers_of_ranks, refuse_per_rank


def pods(least: int, most: int, **more: str) -> dict[str, str]:
    return {pod_env.MIN_PODS: str(least), pod_env.PODS: str(most), pod_env.PROCESSES: "2", **more}


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({}, []),
        (pods(2, 4), [4, 6, 8]),
        (pods(2, 2), []),
        (pods(2, 3, **{pod_env.SPARES: "1"}), []),
        (pods(0, 4), []),
        (pods(1, 4, **{user_env.WORKERS: "2"}), [2, 4]),
    ],
)
def test_an_elastic_job_has_several_numbers_of_ranks(environ: dict[str, str], numbers: list[int]) -> None:
    assert numbers_of_ranks(environ) == numbers


def test_a_state_on_each_rank_is_refused_by_name_in_an_elastic_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": {}, "mine": per_rank({})}
    adapted = {name: adapt(name, each, {"model": model}) for name, each in things.items()}
    refuse_per_rank("adopt", adapted)
    for name, value in pods(1, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=r"^adopt: .* elastic, with 2 to 4 ranks, and 'mine' has a state on each rank"):
        refuse_per_rank("adopt", adapted)
    del adapted["mine"]
    refuse_per_rank("adopt", adapted)
