"""Places of checkpoints, names of GPUs, and free ports."""

from __future__ import annotations

import random

import pytest

from flk_runtime.contract import pod_layout
from flk_runtime.contract.pod_layout import gpu_names
from tests.support.ports import held_ports


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


def test_free_ports_differ_and_are_given_to_nobody_who_asks_for_any() -> None:
    """So the workers and the hub of one run have ports of their own."""
    ports = set(pod_layout.free_ports(1000))
    assert len(ports) == 1000
    assert max(ports) < 32768  # from which Linux gives such ports, unless it is told otherwise


def test_a_port_at_which_somebody_listens_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with held_ports() as hold:
        taken = hold()
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [taken, 20_001, 20_002])
        assert taken not in pod_layout.free_ports(1)
