"""Places of checkpoints."""

from __future__ import annotations

from flk_runtime.contract import pod_layout


def test_a_folder_below_that_of_the_pod_is_of_the_pod_too() -> None:
    folder = pod_layout.CHECKPOINT_FOLDER
    assert all(map(pod_layout.is_of_pod, (folder, f"{folder}/", f"{folder}/training-1")))
    assert not any(map(pod_layout.is_of_pod, (None, "/checkpoints", f"{folder}s", "s3://bucket/flk/checkpoint")))
    assert [pod_layout.on_volume(place) for place in (f"{folder}/training-1", "/checkpoints")] == ["", "/checkpoints"]
