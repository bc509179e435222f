"""The real pip installs packages beside those of this Python, which stay as they are, and a new process finds them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from flk_runtime.launcher.processes.preparation import Preparation, PreparationError
from flk_runtime.launcher.settings import Settings
from tests.local.test_run import Command, flk
from tests.support.commands import WITHOUT_TORCH
from tests.support.wheels import wheel

__all__ = ["flk"]


@pytest.mark.promise("Jobs: Packages and a setup command are there before the ranks start")
def test_a_package_with_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = wheel(tmp_path, "pytest")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "PATH"):
        monkeypatch.setenv(name, "/bin")
    monkeypatch.setenv("FLK_REQUIREMENTS", "r.txt")
    preparation = Preparation(Settings(("t.py",), work=str(tmp_path)))
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


def test_flk_run_installs_packages_and_runs_the_setup_command_once(flk: Command) -> None:
    wheel(flk.folder, "pytest")
    (flk.folder / "r.txt").write_text("--no-index\n--find-links .\n")
    flk.write("""
        import flkdemo, pathlib, shutil
        flkdemo.main()
        print(shutil.which("flkdemo"), pathlib.Path("made").read_text())
    """)
    words = ["--pip", "flkdemo==1.0", "--requirements", "r.txt", "--setup", "echo data >> made", "--processes", "2"]
    cache = flk.folder / "cache"
    code, stdout, stderr = flk("run", *WITHOUT_TORCH, *words, "train.py", env={"XDG_CACHE_HOME": str(cache)})
    assert code == 0, stderr
    said = stdout.split()
    (program,) = {word for word in said if word.endswith("bin/flkdemo")}
    assert Path(program).is_relative_to(cache)
    assert (said.count(pytest.__file__), said.count("data"), said.count(program)) == (2, 2, 2), stdout
