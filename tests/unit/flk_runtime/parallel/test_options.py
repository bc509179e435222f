"""The options of parallelize stand twice, and must be the same."""

from __future__ import annotations

import dataclasses

from flk_runtime.parallel import ParallelArgs, ParallelOptions


def test_each_argument_has_a_default() -> None:
    assert list(ParallelArgs.__annotations__) == [field.name for field in dataclasses.fields(ParallelOptions)]
