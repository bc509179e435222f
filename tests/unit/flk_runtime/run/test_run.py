"""Run: what its methods refuse before they communicate."""

from __future__ import annotations

import pytest
from torch import nn

from flk_runtime.run.run import Run


def test_a_keyword_that_parallelize_lacks_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"parallelize\(\) has no argument 'presision': expected one of precision, blocks"
    ):
        object.__new__(Run).parallelize(nn.Linear(1, 1), presision=None)
