"""GPUs that a process may use."""

from __future__ import annotations

import pytest

from flk_runtime.contract.platform import gpu_names


@pytest.mark.parametrize(
    ("visible", "names"),
    [("", []), ("-1", []), ("3", ["3"]), ("0, 1,", ["0", "1"]), ("GPU-1a,MIG-2b", ["GPU-1a", "MIG-2b"])],
)
def test_the_variable_names_gpus_and_minus_one_names_none(visible: str, names: list[str]) -> None:
    assert gpu_names(visible) == names
