"""The end of a process group on a rank that fails."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flk_runtime.distributed import process_group


def test_an_error_of_nccl_at_the_end_of_a_rank_that_fails_does_not_hide_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort() -> None:
        raise dist.DistBackendError("NCCL error: unhandled cuda error")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(process_group, "_kept", [])
    process_group.leave(at_once=True)
