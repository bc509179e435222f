"""What the runtime reads of torch's private names is there, and does what its docstrings say."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flk_runtime.system import torch_private


def test_many_tensors_are_copied_at_once() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    torch_private.copy_all(targets, sources)
    assert [each.tolist() for each in targets] == [[1, 1], [2, 2, 2]]


def test_a_module_with_a_loading_of_its_own_is_known() -> None:
    class Own(nn.Linear):
        def _load_from_state_dict(self, *arguments: Any) -> None:
            super()._load_from_state_dict(*arguments)

    assert not torch_private.loads_by_itself(nn.Linear(2, 2))
    assert torch_private.loads_by_itself(Own(2, 2))
    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    assert torch_private.loads_by_itself(hooked)


def test_a_profiler_that_runs_is_known() -> None:
    assert not torch_private.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.is_profiled()


def test_operations_are_seen_by_a_mode() -> None:
    seen = []

    class Mode(torch_private.dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    assert "aten.add.Tensor" in seen


def test_torch_has_what_ranks_need_of_process_groups() -> None:
    assert torch_private.flight_recorder("no such function") is None
    for name in ("_get_default_store", "_abort_process_group"):
        assert hasattr(torch.distributed.distributed_c10d, name)
