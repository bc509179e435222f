"""Run: what its methods refuse before they communicate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.run.run import Run
from flk_runtime.run.steps import Steps


def test_a_keyword_that_parallelize_lacks_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"parallelize\(\) has no argument 'presision': expected one of precision, blocks"
    ):
        object.__new__(Run).parallelize(nn.Linear(1, 1), presision=None)


def test_a_step_takes_the_loss_and_no_optimizer() -> None:
    optimizer: Any = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    steps = object.__new__(Steps)
    steps.began = False
    with pytest.raises(SetupError, match=r"run\.step takes the loss, a number, and not SGD"):
        steps.record(optimizer, {}, samples=1, epoch=None)
