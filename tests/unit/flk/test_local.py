"""`flk run`: the Python that starts the launchers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.local import LocalRun, interpreter
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


def test_folders_of_pods_that_cannot_be_made_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flk.local.interpreter", lambda: (sys.executable, ""))
    (tmp_path / ".flk").touch()
    job = validated({"command": "train.py", "name": "gpt"})
    with pytest.raises(UsageError) as caught:
        LocalRun(job, tmp_path, b"").run()
    assert str(caught.value) == f"{tmp_path}/.flk/pods/gpt/0 cannot be made (Not a directory)"
    assert caught.value.hint == "--pod-folders needs a folder that you can write"
