"""The real pip installs packages beside those of this Python, which stay as they are, and a new process finds them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk_runtime.launcher.processes.preparation import Preparation, PreparationError
from flk_runtime.launcher.settings import Settings
from tests.support.wheels import wheel


@pytest.mark.promise("Jobs: Packages and a setup command are there before the ranks start")
@pytest.mark.soak
def test_a_package_with_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = wheel(tmp_path, "pytest")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "PATH"):
        monkeypatch.setenv(name, "/bin")
    monkeypatch.setenv("FLK_REQUIREMENTS", "r.txt")
    preparation = Preparation(Settings(("t.py",), work=str(tmp_path)), SimpleNamespace(group=0))
    # All that is installed needs a hash: pytest is there already.
    text = "--no-index\n--find-links .\nflkdemo==1.0 --hash=sha256:{}\n"
    (tmp_path / "r.txt").write_text(text.format("0" * 64))
    with pytest.raises(PreparationError, match="DO NOT MATCH THE HASHES"):
        preparation.run()
    (tmp_path / "r.txt").write_text(text.format(hashlib.sha256(made.read_bytes()).hexdigest()))
    preparation.run()
    # A new process finds the package by its environment: its program, and another Python.
    for command in (["flkdemo"], [sys.executable, "-c", "import flkdemo; flkdemo.main()"]):
        assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == pytest.__file__
