"""A command that a rank starts uses its own runtime, and not the part of it that has travelled with the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flk
from flk.errors import FlkError
from flk.local.variables import launcher_variables
from flk.manifest.runtime import runtime_archive
from flk.planning import make_plan
from flk.shipped import without_shipped
from flk.spec.job import validated
from flk_runtime.bootstrap import unpacked


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A folder as `flk_runtime.bootstrap` makes it, with a runtime that lacks everything."""
    folder = tmp_path / ".flk" / "0123456789ab"
    (folder / "flk_runtime").mkdir(parents=True)
    (folder / "flk_runtime" / "__init__.py").touch()
    return folder


def before_others(folder: str) -> str:
    """PYTHONPATH with this folder first. The others are kept: flk is in them where it is not installed."""
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


def test_other_folders_stay(shipped: Path, tmp_path: Path) -> None:
    kept = [str(tmp_path), str(tmp_path / ".flk" / "packages")]
    assert without_shipped([kept[0], str(shipped), "", kept[1]]) == [kept[0], "", kept[1]]  # "": the current folder


def test_a_rank_is_told_to_start_another_process_for_the_client(tmp_path: Path) -> None:
    """Else a module is missing that has not travelled, or a job that the rank submits gets this part of the runtime."""
    archive = tmp_path / "flk_runtime.zip"
    archive.write_bytes(runtime_archive(frozenset()))
    environ = os.environ | {"PYTHONPATH": before_others(unpacked(str(archive), str(tmp_path)))}
    use = "import flk_runtime, flk\nprint(issubclass(flk.ApiError, flk.FlkError))\ntry: flk.submit\n"
    use += "except flk.UsageError as error: print(error, error.hint, sep='; ')"
    done = subprocess.run([sys.executable, "-c", use], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "True",
        "flk.submit needs all modules of flk_runtime, and this process has only those that its job uses; "
        "start another process for it, as subprocess.run([sys.executable, ...]) or the command flk",
    ]
    assert callable(flk.submit)


def test_a_rank_makes_no_part_of_the_runtime_for_another_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a rank whose part has all modules that `flk.submit` imports."""
    contract = tmp_path / ".flk" / "0" / "flk_runtime" / "contract"
    contract.mkdir(parents=True)
    monkeypatch.setattr("flk_runtime.contract.__file__", str(contract / "__init__.py"))
    with pytest.raises(FlkError, match="a job's part of the runtime needs all modules of flk_runtime"):
        runtime_archive(frozenset())


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_command_finds_its_own_runtime(shipped: Path, safe: str) -> None:
    environ = os.environ | {"PYTHONPATH": before_others(str(shipped)), "PYTHONSAFEPATH": safe}
    done = subprocess.run([sys.executable, "-m", "flk", "--version"], env=environ, capture_output=True, text=True)
    assert done.stdout.startswith("flk "), done.stderr


def test_flk_run_starts_launchers_with_its_own_runtime(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, python = validated({"command": "train.py", "name": "gpt"}), (sys.executable, "/client")
    for given, found in (
        ([str(shipped), "/mine"], "/client:/mine"),
        ([str(shipped)], "/client"),
        (["", "/mine"], "/client::/mine"),
        ([""], "/client"),
    ):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
        assert launcher_variables(job, tmp_path, tmp_path, python)["PYTHONPATH"] == found


def test_flk_plan_runs_the_script_with_its_own_runtime(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(env)
        return subprocess.CompletedProcess(command, 1, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    for path, given, found in (("", [str(shipped), "/mine"], "/mine"), ("/client", [str(shipped)], "/client")):
        monkeypatch.setattr("flk.planning.interpreter", lambda path=path: (sys.executable, path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
        with pytest.raises(FlkError, match="the script failed while it was planned"):
            make_plan(validated({"command": "train.py", "name": "gpt"}), tmp_path, "H100")
        assert seen[-1]["PYTHONPATH"] == found
