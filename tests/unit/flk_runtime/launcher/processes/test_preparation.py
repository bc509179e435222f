"""The preparation of a pod: what pip or the setup command does decides how it goes on. pip is a script here."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract.failure import ExitCode, Kind
from flk_runtime.launcher.processes import preparation
from flk_runtime.launcher.processes.preparation import Preparation, PreparationError
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.signals import Wakeup

REFUSED = (
    "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'NewConnectionError('<HTTPConnection"
    " object>: Failed to establish a new connection: [Errno 111] Connection refused')': /simple/a/\n"
    "ERROR: Could not find a version that satisfies the requirement a (from versions: none)\n"
    "ERROR: No matching distribution found for a\n"
)
MISSING = "ERROR: Could not find a version that satisfies the requirement a==9 (from versions: {versions})\n" + (
    "ERROR: No matching distribution found for a==9\n"
)


class Pod:
    """A pod with a script in the place of pip."""

    def __init__(self, work: Path, patch: pytest.MonkeyPatch) -> None:
        self.work = work
        self.patch = patch
        self.calls = work / "calls"
        self.wakeup = Wakeup()
        patch.setattr(sys, "path", [*sys.path])
        for name in ("PYTHONPATH", "PATH", "HOME"):
            patch.setenv(name, os.environ.get(name, ""))
        for name in ("FLK_PACKAGES", "FLK_SETUP_DONE", "FLK_PIP", "FLK_REQUIREMENTS", "FLK_SETUP", "PIP_CACHE_DIR"):
            patch.delenv(name, raising=False)
        patch.setattr(preparation, "_DELAYS", (0.01,))

    def pip(self, script: str) -> None:
        path = self.work / "pip.sh"
        path.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n{script}\n')
        path.chmod(0o755)
        self.patch.setattr(Preparation, "_environment", lambda _: str(path))

    def prepare(self, *, deadline: float = 0.0, join_timeout: float = 60.0, **environ: str) -> Settings:
        for name, value in environ.items():
            self.patch.setenv(f"FLK_{name}", value)
        settings = Settings(("t.py",), work=str(self.work), deadline=deadline, join_timeout=join_timeout)
        return Preparation(settings, self.wakeup).run()

    def failure(self, **options: Any) -> PreparationError:
        with pytest.raises(PreparationError) as caught:
            self.prepare(**options)
        return caught.value


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    made = Pod(tmp_path, monkeypatch)
    yield made
    for end in made.wakeup.ends:
        end.close()


def test_packages_are_installed_once_for_each_pod_and_found(pod: Pod, capfd: pytest.CaptureFixture[str]) -> None:
    (pod.work / "r.txt").write_text("b==1\n")
    pod.patch.setenv("HOME", str(pod.work))
    pod.patch.setenv("PYTHONPATH", "/runtime")
    pod.pip("echo Collecting a")
    for _ in range(2):  # the second launcher of a pod finds what the first one has done
        pod.prepare(PIP="a>=1\nc @ https://me:secret@host/c.whl", REQUIREMENTS="r.txt")
    (call,) = pod.calls.read_text().splitlines()
    assert call.startswith("-m pip install --no-input")
    assert call.endswith("--no-cache-dir a>=1 c @ https://me:secret@host/c.whl -r r.txt")
    site = str(pod.work / ".flk" / "packages" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    ahead = next(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    assert ahead == f"{site}/site-packages"
    assert os.environ["PYTHONPATH"].startswith(f"/runtime:{site}")
    assert os.environ["PATH"].startswith(str(pod.work / ".flk" / "packages" / "bin"))
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == [
        "[pod 0] installing packages: a>=1 c @ https://****@host/c.whl -r r.txt",
        "[pod 0] pip: Collecting a",
    ]
    assert lines[2].startswith("[pod 0] installed packages in ")


@pytest.mark.parametrize(
    ("home", "cache", "kept"), [(True, "", False), (True, "/cache", True), (False, "", True), (False, "/cache", True)]
)
def test_pip_keeps_its_downloads_only_where_they_outlive_the_pod(pod: Pod, home: bool, cache: str, kept: bool) -> None:
    pod.patch.setenv("HOME", str(pod.work) if home else "/home/ada")
    if cache:
        pod.patch.setenv("PIP_CACHE_DIR", cache)
    pod.pip(f'echo "cache: $PIP_CACHE_DIR" >> {pod.calls}')
    pod.prepare(PIP="a")
    call, environment = pod.calls.read_text().splitlines()
    assert ("--no-cache-dir" not in call) == kept
    assert environment == f"cache: {cache}"


def test_an_index_that_cannot_be_reached_is_asked_again(pod: Pod, capfd: pytest.CaptureFixture[str]) -> None:
    (pod.work / "said").write_text(REFUSED)
    pod.pip(f"test $(wc -l < {pod.calls}) -gt 2 || {{ cat {pod.work}/said; exit 1; }}")
    pod.prepare(PIP="a")
    assert len(pod.calls.read_text().splitlines()) == 3
    assert "[pod 0] installing packages: pip cannot reach the index; trying again in 0 s" in capfd.readouterr().err


@pytest.mark.promise("Jobs: Packages and a setup command are there before the ranks start")
@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (
            MISSING.format(versions="none"),
            Kind.USAGE,
            "pip cannot install the packages: No matching distribution found",
        ),
        # The index was reached in the end.
        (
            REFUSED.splitlines()[0] + "\n" + MISSING.format(versions="1.0, 1.1"),
            Kind.USAGE,
            "pip cannot install the packages: No matching distribution found for a==9",
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Got 15d7\n", Kind.USAGE, "DO NOT MATCH THE HASHES"),
        (
            "error: subprocess-exited-with-error\nnote: not pip's\n",
            Kind.USAGE,
            "packages: subprocess-exited-with-error",
        ),
        ("Killed\n", Kind.USAGE, "pip cannot install the packages: Killed"),
        (
            REFUSED,
            Kind.UNPREPARED,
            r"pip could not reach the index of packages for \d+ s: WARNING: Retrying .* Connection refused",
        ),
        (
            "ERROR: HTTP error 503 while getting a\n",
            Kind.UNPREPARED,
            r"for \d+ s: ERROR: HTTP error 503 while",
        ),
    ],
)
def test_the_reason_of_pip_decides_whether_a_failure_is_final(pod: Pod, said: str, kind: Kind, message: str) -> None:
    (pod.work / "said").write_text(said)
    pod.pip(f"cat {pod.work}/said; exit 1")
    error = pod.failure(PIP="a==9", join_timeout=0.0 if kind is Kind.UNPREPARED else 60.0)
    assert (error.kind, error.output) == (kind, said.strip())
    assert re.search(message, str(error))


def test_a_setup_command_runs_once_and_its_failure_has_its_last_lines(pod: Pod) -> None:
    pod.prepare(SETUP="echo x >> ran; sleep 60 >/dev/null 2>&1 & echo $! > left")
    os.kill(int((pod.work / "left").read_text()), signal.SIGKILL)  # what it leaves in the background lives on
    pod.prepare()
    assert (pod.work / "ran").read_text() == "x\n"
    (pod.work / ".flk" / "setup" / "done").unlink()
    error = pod.failure(SETUP="seq 30; echo no such disk >&2; exit 7")
    assert str(error) == "the setup command ended with exit code 7: no such disk"
    assert error.output.splitlines() == [*map(str, range(12, 31)), "no such disk"]
    assert str(pod.failure(SETUP="kill -9 $$")) == "the setup command was killed by signal 9"


def test_deadline_and_silence_end_the_preparation_and_its_processes(pod: Pod) -> None:
    begin = time.monotonic()
    late = pod.failure(SETUP="echo $$ > group; exec sleep 60", deadline=3.0)
    assert (late.kind.meaning.code, late.kind) == (ExitCode.TIMEOUT, Kind.DEADLINE)
    with pytest.raises(ProcessLookupError):
        os.killpg(int((pod.work / "group").read_text()), 0)
    quiet = pod.failure(SETUP="sleep 60", deadline=0, join_timeout=0.3)
    assert (str(quiet), quiet.kind) == ("the setup command wrote nothing for 0.3 s", Kind.UNPREPARED)
    assert time.monotonic() - begin < 30
    left = pod.prepare(SETUP="true", deadline=100).deadline
    assert 50 < left < 100


def test_a_signal_ends_the_launcher_and_the_command(pod: Pod) -> None:
    ended: list[int] = []

    def leave(code: int) -> None:
        ended.append(code)
        raise SystemExit

    pod.patch.setattr(os, "_exit", leave)
    pod.patch.setenv("FLK_SETUP", "echo $$ > group; exec sleep 60")
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    pod.wakeup.install()

    over = threading.Event()

    def stop_once_it_runs() -> None:
        group = pod.work / "group"
        while pod.wakeup.starting or not (group.exists() and group.read_text()):
            if over.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop_once_it_runs)
    stopping.start()
    try:
        with pytest.raises(SystemExit):
            Preparation(Settings(("t.py",), work=str(pod.work)), pod.wakeup).run()
    finally:
        over.set()
        stopping.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == [ExitCode.PREEMPTED]
    with pytest.raises(ProcessLookupError):
        os.killpg(int((pod.work / "group").read_text()), 0)


def test_a_python_without_pip_says_so(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    import venv

    def create(self: venv.EnvBuilder, folder: Path) -> None:
        python, site = folder / "bin" / "python", Preparation._site.fget  # type: ignore[attr-defined]
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
        site(made).mkdir(parents=True)

    made = Preparation(Settings(("t.py",), work=str(pod.work)), pod.wakeup)
    monkeypatch.setattr(venv.EnvBuilder, "create", create)
    error = pod.failure(PIP="a")
    assert str(error) == "the image has no pip, with which packages are installed, and no ensurepip"

    def fail(self: venv.EnvBuilder, folder: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(venv.EnvBuilder, "create", fail)
    assert "cannot make a virtual environment: [Errno 30] Read-only file system" in str(pod.failure(PIP="a"))


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
