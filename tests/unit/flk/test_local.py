"""`flk run`: the Python that starts the launchers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from flk import local, local_gpus
from flk.errors import UsageError
from flk.local import interpreter
from flk.spec.job import validated


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


@pytest.mark.parametrize(("here", "seen"), [(2, "2 0,1"), (0, "None 0,1")])
def test_the_launchers_know_of_gpus_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: int, seen: str
) -> None:
    """A job that asks for GPUs is also tried on machines without one."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "${FLK_GPUS:-None} $CUDA_VISIBLE_DEVICES" > seen\n')
    python.chmod(0o755)
    monkeypatch.setattr(local, "interpreter", lambda: (str(python), ""))
    monkeypatch.setattr(local_gpus, "count_gpus", lambda: here)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = validated({"name": "a", "command": "a.py", "replicas": 1, "resources": {"gpu": 2}})
    assert local.LocalRun(job, tmp_path).run() == 0
    assert (tmp_path / "seen").read_text().strip() == seen
