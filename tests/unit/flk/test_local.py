"""`flk run`: how replicas share the GPUs of this machine, and the Python that starts them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.local import interpreter, visible_devices
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


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_python_on_the_path_is_used_if_it_has_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_torch: bool
) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\nexit {0 if has_torch else 1}\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # flk is installed without torch
    if has_torch:
        assert interpreter()[0] == str(python)
        return
    with pytest.raises(UsageError) as caught:
        interpreter()
    assert str(caught.value) == f"no Python with torch: neither flk's own nor {python} has it"
    assert f"{sys.executable} -m pip install torch, or pipx inject flk torch" in caught.value.hint
