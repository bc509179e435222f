"""Tests of flk_runtime.parallel.gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel.gradients import SameUse


def record(name: str) -> SimpleNamespace:
    return SimpleNamespace(_param_fqn=name, unsharded_accumulated_grad=None)


def test_a_use_that_the_ranks_have_not_compared_is_refused_between_two_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body, head = record("body"), record("head")
    reduced: list[int] = []
    group = SimpleNamespace(
        fsdp_params=[body, head], reduce_grads=True, post_backward=lambda: reduced.append(len(reduced))
    )
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "all_gather", lambda found, own: found[0].copy_(own))
    monkeypatch.setattr("flk_runtime.parallel.gradients.comm_device", lambda device: device)
    SameUse(0, group, nn.Module())
    for number in range(10):  # the ranks compare the first 8
        body.unsharded_accumulated_grad = torch.ones(1)
        head.unsharded_accumulated_grad = torch.ones(1) if number % 2 else None
        group.post_backward()
    body.unsharded_accumulated_grad = None
    group.reduce_grads = False
    group.post_backward()  # in no_sync
    group.reduce_grads = True
    with pytest.raises(SetupError, match="'body' has no gradient on rank 3, unlike in the passes before"):
        group.post_backward()
    assert len(reduced) == 11
