"""The archive that travels with a job runs in any Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flk.manifest import runtime_archive
from flk_runtime.system.archive import unpacked

MODULES = """
import importlib, os, pkgutil, sys
import flk_runtime
assert flk_runtime.__path__[0].startswith(os.environ["FLK_WORK"]), flk_runtime.__path__
for module in pkgutil.walk_packages(flk_runtime.__path__, "flk_runtime."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # of a package that a host or a sink needs
            assert not error.name.startswith("flk_runtime"), error
print("all")
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "flk_runtime.zip"
    path.write_bytes(runtime_archive())
    return path


def run(archive: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"FLK_WORK": str(archive.parent / "work"), "PATH": os.environ["PATH"], "PYTHONPATH": path}
    command = [sys.executable, str(archive), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=archive.parent)


def test_it_runs_the_runtime_that_it_contains(archive: Path) -> None:
    done = run(archive, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m flk_runtime" in done.stdout


def test_it_is_unpacked_once(archive: Path, tmp_path: Path) -> None:
    folder = unpacked(str(archive), str(tmp_path / "work"))
    mark = Path(folder, "mark")
    mark.touch()
    assert unpacked(str(archive), str(tmp_path / "work")) == folder
    assert mark.exists()
    assert os.listdir(Path(folder).parent) == [Path(folder).name]


def test_two_processes_may_unpack_it_at_the_same_time(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = str(tmp_path / "work")
    folder = unpacked(str(archive), work)
    answers = iter((False, True))  # the other process has finished between the two looks
    exists = os.path.isdir
    monkeypatch.setattr("os.path.isdir", lambda path: next(answers) if path == folder else exists(path))
    assert unpacked(str(archive), work) == folder
    assert next(answers, "both looks") == "both looks"


@pytest.mark.promise("Jobs: A script runs without an image build, since code and runtime travel with the job")
def test_all_modules_can_be_imported_as_they_travel(archive: Path, tmp_path: Path) -> None:
    folder = unpacked(str(archive), str(tmp_path / "work"))
    environment = {"FLK_WORK": str(tmp_path / "work"), "PATH": os.environ["PATH"], "PYTHONPATH": folder}
    done = subprocess.run([sys.executable, "-c", MODULES], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr
