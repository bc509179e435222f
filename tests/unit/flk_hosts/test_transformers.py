"""A Trainer in an elastic job, whose steps have as many samples with fewer ranks as with all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flk_runtime.contract import pod_env
from flk_runtime.errors import SetupError
from tests.support.collection import skip_without

skip_without("transformers")


def fitted(accumulation: int, ranks: int) -> int:
    from flk_hosts.transformers import _fit_to_elastic_job

    arguments = SimpleNamespace(gradient_accumulation_steps=accumulation, world_size=ranks)
    _fit_to_elastic_job(arguments)
    return arguments.gradient_accumulation_steps


def test_fewer_ranks_take_more_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitted(3, 2) == 3
    monkeypatch.setenv(pod_env.PODS, "4")
    monkeypatch.setenv(pod_env.MIN_PODS, "2")
    assert [fitted(3, ranks) for ranks in (4, 3, 2)] == [3, 4, 6]
    with pytest.raises(
        SetupError, match=r"3 ranks cannot share the 8 .* gradient_accumulation_steps be a multiple of 3"
    ):
        fitted(2, 4)
    monkeypatch.setenv(pod_env.BATCH, "scale")
    with pytest.raises(SetupError, match="with batch: scale a Trainer would not find its place"):
        fitted(3, 4)
