"""`flk run`: how replicas share the GPUs of this machine."""

from __future__ import annotations

import pytest

from flk.errors import UsageError
from flk.local import visible_devices
from flk.spec.job import Job, validated


def job(replicas: int) -> Job:
    return validated({"command": "a.py", "replicas": replicas, "resources": {"gpu": 2}})


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, [["0", "1"], ["2", "3"]]),
        ("", [["0", "1"], ["2", "3"]]),
        ("4,5,6,7", [["4", "5"], ["6", "7"]]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]]),
    ],
)
def test_each_replica_has_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: list[list[str]]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [visible_devices(job(2), index) for index in range(2)] == devices


def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert visible_devices(job(1), 0) == ["2", "3"]
    with pytest.raises(UsageError) as caught:
        visible_devices(job(2), 1)
    assert str(caught.value) == ("the job needs 4 GPUs (2 replicas with 2 each), and CUDA_VISIBLE_DEVICES=2,3 names 2")
