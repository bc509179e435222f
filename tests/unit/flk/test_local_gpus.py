"""How the replicas of `flk run` share the GPUs of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.local_gpus import count_gpus, shares
from flk.spec.job import Job, validated


def job(replicas: int, gpu: int = 0, processes: int | None = None) -> Job:
    return validated({"command": "a.py", "replicas": replicas, "processes": processes, "resources": {"gpu": gpu}})


@pytest.mark.parametrize("gpus", [0, 4, 8])
@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0,1", "2,3"]),
        ("", ["0,1", "2,3"]),
        ("4,5,6,7", ["4,5", "6,7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_each_replica_has_the_gpus_that_it_asks_for(visible: str | None, devices: list[str], gpus: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert shares(job(2, gpu=2), gpus, environ) == devices


def test_too_few_gpus_are_an_error() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert shares(job(1, gpu=2), 8, environ) == ["2,3"]
    with pytest.raises(UsageError) as caught:
        shares(job(2, gpu=2), 8, environ)
    assert str(caught.value) == "the job needs 4 GPUs (2 replicas with 2 each), and CUDA_VISIBLE_DEVICES=2,3 names 2"
    with pytest.raises(UsageError) as caught:
        shares(job(1, gpu=2), 1, {})
    assert str(caught.value) == "the job needs 2 GPUs (1 replica with 2 each), and this machine has 1"


@pytest.mark.parametrize(
    ("replicas", "processes", "gpus", "devices"),
    [
        (1, 1, 1, ["0"]),
        (2, 2, 4, ["0,1", "2,3"]),
        (4, 1, 1, ["", "", "", ""]),
        (1, 2, 1, [""]),
        (4, 1, 0, None),
    ],
)
def test_a_job_that_asks_for_none_has_one_for_each_rank_or_none(
    replicas: int, processes: int, gpus: int, devices: list[str] | None
) -> None:
    assert shares(job(replicas, processes=processes), gpus, {}) == devices


@pytest.mark.parametrize("visible", ["", "0", "0,1"])
def test_what_the_user_shows_to_a_job_that_asks_for_none_stays(visible: str) -> None:
    assert shares(job(4), 8, {"CUDA_VISIBLE_DEVICES": visible}) is None


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
    assert count_gpus(tmp_path / "none") == 0
