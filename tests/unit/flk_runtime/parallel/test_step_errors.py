"""An optimizer that cannot compute with shards is refused by its name; other errors stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flk_runtime.errors import SetupError
from flk_runtime.parallel.step_errors import explain_errors


class Failing(torch.optim.SGD):
    error: Exception

    def step(self, closure: Any = None) -> None:
        raise self.error


def test_an_error_of_dtensor_names_the_optimizer_and_others_stay() -> None:
    optimizer = Failing([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(2):
        explain_errors(optimizer)
    optimizer.error = RuntimeError("got mixed torch.Tensor and DTensor\nand more")
    with pytest.raises(SetupError, match=r"Failing cannot train .*: got mixed torch.Tensor and DTensor; use another"):
        optimizer.step()
    optimizer.error = RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.step()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:5"),
        torch.distributed.DistBackendError("NCCL communicator was aborted"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        OSError(5, "Input/output error"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_fails_beneath_dtensor_is_no_mistake_of_the_optimizer(error: Exception) -> None:
    """A step computes and communicates through DTensor, whose frames are in each traceback."""
    scope: dict[str, Any] = {"error": error}
    exec(compile("def compute(): raise error", "/site-packages/torch/distributed/tensor/_dispatch.py", "exec"), scope)

    class Computing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            scope["compute"]()

    optimizer = Computing([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    explain_errors(optimizer)
    with pytest.raises(type(error)) as caught:
        optimizer.step()
    assert caught.value is error


@pytest.mark.parametrize("before", [True, False])
def test_schedulers_made_before_and_after_see_the_steps(before: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    make = lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    schedulers = [make()] if before else []
    explain_errors(optimizer)
    schedulers.append(make())
    optimizer.step()
    for each in schedulers:
        each.step()  # which warns where it has seen no step, and warnings are errors
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** len(schedulers))
