"""The preparation of a pod: what pip or the setup command does decides how it goes on. pip is a script here."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Kind
from flk_runtime.launcher.processes import preparation
from flk_runtime.launcher.processes.preparation import Preparation, PreparationError
from flk_runtime.launcher.settings import Settings

MISSING = """ERROR: Could not find a version that satisfies the requirement a==9 (from versions: none)
ERROR: No matching distribution found for a==9
"""


class Pod:
    """A pod with a script in the place of pip."""

    def __init__(self, work: Path, patch: pytest.MonkeyPatch) -> None:
        self.work = work
        self.patch = patch
        self.calls = work / "calls"
        self.wakeup: Any = SimpleNamespace(group=0)
        patch.setattr(sys, "path", [*sys.path])
        for name in ("PYTHONPATH", "PATH", "HOME"):
            patch.setenv(name, os.environ.get(name, ""))
        for name in ("FLK_PACKAGES", "FLK_SETUP_DONE", "FLK_PIP", "FLK_REQUIREMENTS", "FLK_SETUP"):
            patch.delenv(name, raising=False)

    def pip(self, script: str) -> None:
        path = self.work / "pip.sh"
        path.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n{script}\n')
        path.chmod(0o755)
        self.patch.setattr(Preparation, "_environment", lambda _: str(path))

    def prepare(self, *, deadline: float = 0.0, **environ: str) -> None:
        for name, value in environ.items():
            self.patch.setenv(f"FLK_{name}", value)
        Preparation(Settings(("t.py",), work=str(self.work), deadline=deadline), self.wakeup).run()

    def failure(self, **options: Any) -> PreparationError:
        with pytest.raises(PreparationError) as caught:
            self.prepare(**options)
        return caught.value


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(tmp_path, monkeypatch)


def test_packages_are_installed_once_for_each_pod_and_found(pod: Pod, capfd: pytest.CaptureFixture[str]) -> None:
    (pod.work / "r.txt").write_text("b==1\n")
    pod.patch.setenv("PYTHONPATH", "/runtime")
    pod.pip("echo Collecting a")
    for _ in range(2):  # the second launcher of a pod finds what the first one has done
        pod.prepare(PIP="a>=1\nc @ https://me:secret@host/c.whl", REQUIREMENTS="r.txt")
    (call,) = pod.calls.read_text().splitlines()
    assert call.startswith("-m pip install --no-input")
    assert call.endswith("off a>=1 c @ https://me:secret@host/c.whl -r r.txt")
    site = str(pod.work / ".flk" / "packages" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    ahead = next(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    assert ahead == f"{site}/site-packages"
    assert os.environ["PYTHONPATH"].startswith(f"/runtime:{site}")
    assert os.environ["PATH"].startswith(str(pod.work / ".flk" / "packages" / "bin"))
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == [
        "[pod 0] installing packages: a>=1 c @ https://me:***@host/c.whl -r r.txt",
        "[pod 0] pip: Collecting a",
    ]
    assert lines[2].startswith("[pod 0] installed packages in ")


@pytest.mark.promise("Jobs: Packages and a setup command are there before the ranks start")
@pytest.mark.parametrize(
    ("said", "message"),
    [
        (MISSING, "ERROR: No matching distribution found for a==9"),
        ("error: subprocess-exited-with-error\nnote: not pip's\n", "error: subprocess-exited-with-error"),
        ("Killed\n", "Killed"),
    ],
)
def test_a_failed_pip_ends_the_job_with_its_last_lines(pod: Pod, said: str, message: str) -> None:
    (pod.work / "said").write_text(said)
    pod.pip(f"cat {pod.work}/said; exit 1")
    error = pod.failure(PIP="a==9")
    assert (error.kind, error.output, str(error)) == (
        Kind.USAGE,
        said.strip(),
        f"pip cannot install the packages: {message}",
    )


def test_a_setup_command_runs_once_and_its_failure_has_its_last_lines(pod: Pod) -> None:
    pod.prepare(SETUP="echo x >> ran; sleep 60 & echo $! > left")
    left = int((pod.work / "left").read_text())
    assert os.readlink(f"/proc/{left}/fd/1") == str(pod.work / ".flk" / "setup.log")  # where it goes on to write
    os.kill(left, signal.SIGKILL)  # what it leaves in the background lives on
    pod.prepare()
    assert (pod.work / "ran").read_text() == "x\n"
    (pod.work / ".flk" / "setup" / "done").unlink()
    error = pod.failure(SETUP="seq 30; echo no such disk >&2; exit 7")
    assert str(error) == "the setup command ended with exit code 7: no such disk"
    assert error.output.splitlines() == [*map(str, range(12, 31)), "no such disk"]
    assert str(pod.failure(SETUP="kill -9 $$")) == "the setup command was killed by signal 9"


def test_the_deadline_ends_the_preparation_and_its_processes(pod: Pod) -> None:
    late = pod.failure(SETUP="echo $$ > group; exec sleep 60", deadline=1.0)
    assert (late.kind.meaning.code, late.kind) == (ExitCode.TIMEOUT, Kind.DEADLINE)
    assert pod.wakeup.group == int((pod.work / "group").read_text())  # which a signal would end
    with pytest.raises(ProcessLookupError):
        os.killpg(pod.wakeup.group, 0)


def test_packages_in_development_mode_are_found_by_ranks_and_by_what_they_start(pod: Pod) -> None:
    """``-e .`` in requirements leaves a file .pth that names the folder, which only site reads."""
    source = pod.work / "libsrc"
    source.mkdir()
    preparing = Preparation(Settings(("t.py",), work=str(pod.work)), pod.wakeup)
    preparing._site.mkdir(parents=True)
    (preparing._site / "__editable__.pth").write_text(f"{source}\n")
    image = list(sys.path)
    preparing._use()
    added = [str(preparing._site), str(source)]
    assert [path for path in sys.path if path not in added] == image
    assert os.environ["PYTHONPATH"].split(os.pathsep)[-2:] == added
    sites = [i for i, path in enumerate(sys.path) if path.endswith(preparation._SITES) and path not in added]
    assert sys.path.index(added[1]) < min(sites)  # what is installed for the job comes before the image's
