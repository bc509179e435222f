"""Places of checkpoints."""

from __future__ import annotations

import pytest

from flk_runtime.contract import pod_layout
from flk_runtime.contract.pod_layout import gpu_names


def test_a_folder_below_that_of_the_pod_is_of_the_pod_too() -> None:
    folder = pod_layout.CHECKPOINT_FOLDER
    assert all(map(pod_layout.is_of_pod, (folder, f"{folder}/", f"{folder}/training-1")))
    assert not any(map(pod_layout.is_of_pod, (None, "/checkpoints", f"{folder}s", "s3://bucket/flk/checkpoint")))


@pytest.mark.parametrize(
    ("visible", "names"),
    [("", []), ("-1", []), ("3", ["3"]), ("0, 1,", ["0", "1"]), ("GPU-1a,MIG-2b", ["GPU-1a", "MIG-2b"])],
)
def test_the_variable_names_gpus_and_minus_one_names_none(visible: str, names: list[str]) -> None:
    assert gpu_names(visible) == names
