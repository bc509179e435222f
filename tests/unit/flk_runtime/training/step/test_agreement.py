"""Agreement: what of an optimizer the ranks compare."""

from __future__ import annotations

import torch
from torch import nn

from flk_runtime.training.step.agreement import _described


def test_hyperparameters_are_told_without_what_differs_between_ranks_that_train_alike() -> None:
    """Such as the GPU of a tensor, and the address of a function."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0] |= {"betas": (torch.tensor(0.5), 0.99), "schedules": [[max, None]]}
    own = {id(parameter) for parameter in model.parameters()}
    described = {name.partition(" ")[0]: text for name, text in _described(own, [optimizer])}
    assert described["lr"] == "0.5"
    assert described["betas"] == repr(["0.5", "0.99"])
    assert described["schedules"] == repr([repr(["builtin_function_or_method", "None"])])
