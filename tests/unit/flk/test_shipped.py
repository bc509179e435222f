"""A command that a rank starts uses its own runtime, and not the part of it that has travelled with the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flk.local import LocalRun
from flk.shipped import without_shipped
from flk.spec.job import validated


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A folder as `flk_runtime.bootstrap` makes it, with a runtime that lacks everything."""
    folder = tmp_path / ".flk" / "0123456789ab"
    (folder / "flk_runtime").mkdir(parents=True)
    (folder / "flk_runtime" / "__init__.py").touch()
    return folder


def test_other_folders_stay(shipped: Path, tmp_path: Path) -> None:
    kept = [str(tmp_path), str(tmp_path / ".flk" / "packages")]
    assert without_shipped(["", kept[0], str(shipped), kept[1]]) == kept


def test_a_command_finds_its_own_runtime(shipped: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(shipped)}
    done = subprocess.run([sys.executable, "-m", "flk", "--version"], env=environ, capture_output=True, text=True)
    assert done.stdout.startswith("flk "), done.stderr


def test_flk_run_starts_launchers_with_its_own_runtime(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flk.local.interpreter", lambda: (sys.executable, "/client"))
    run = LocalRun(validated({"command": "train.py", "name": "gpt"}), tmp_path)
    for given, found in (([str(shipped), "/mine"], "/client:/mine"), ([str(shipped)], "/client")):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
        assert run._environment(tmp_path)["PYTHONPATH"] == found
