"""What the runtime reads of torch's private names is there, and does what its docstrings say."""

from __future__ import annotations

import torch

from flk_runtime.system import torch_private


def test_a_profiler_that_runs_is_known() -> None:
    assert not torch_private.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.is_profiled()


def test_torch_has_what_ranks_need_of_process_groups() -> None:
    assert torch_private.flight_recorder("no such function") is None
    for name in ("_get_default_store", "_abort_process_group"):
        assert hasattr(torch.distributed.distributed_c10d, name)
