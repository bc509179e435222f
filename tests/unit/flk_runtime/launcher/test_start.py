"""The entry point of the launcher: what is left of one that ends in an unexpected way."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from flk_runtime.contract import ExitCode, pod_env, user_env
from flk_runtime.contract.failure import Kind
from flk_runtime.contract.record import JobRecord
from flk_runtime.launcher import start
from flk_runtime.launcher.processes import preparation
from flk_runtime.launcher.start import SetupError, unpack


class Ended(BaseException):
    """Takes the place of os._exit."""


@pytest.mark.parametrize("place", ["from_environment", "_run"])
def test_any_exception_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    def fail(*arguments: Any) -> NoReturn:
        raise RuntimeError("no reason: hunter2hunter2")

    def end(code: int) -> NoReturn:
        raise Ended(code)

    variables = {
        user_env.JOB: "gpt",
        user_env.POD_NAME: "gpt-worker-0",
        pod_env.POD_INDEX: "3" if place == "from_environment" else "0",
        pod_env.TERMINATION_LOG: str(tmp_path / "log"),
        "API_TOKEN": "hunter2hunter2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "Wakeup", lambda: SimpleNamespace(install=lambda: None))
    monkeypatch.setattr(start.Settings if place == "from_environment" else start, place, fail)
    monkeypatch.setattr(start.os, "_exit", end)
    with pytest.raises(Ended) as caught:
        start.main(["train.py"])
    assert caught.value.args == (ExitCode.ERROR,)
    record = JobRecord.from_json((tmp_path / "log").read_text())
    assert record is not None
    assert (record.outcome, record.code) == ("failed", ExitCode.ERROR)
    assert record.failure is not None
    failure = record.failure
    assert (failure.kind, failure.type, failure.message) == (Kind.EXCEPTION, "RuntimeError", "no reason: ***")
    assert (str(failure.pod), failure.pod_name) == (variables[pod_env.POD_INDEX], "gpt-worker-0")
    assert capsys.readouterr().err.splitlines()[-1] == "RuntimeError: no reason: ***"


@pytest.mark.parametrize("setup", ["", "git clone"])
def test_a_wrong_name_of_the_script_is_told_before_packages_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str
) -> None:
    """A setup command may fetch the script."""
    prepared: list[object] = []
    monkeypatch.setattr(start, "resolve_python_path", lambda *_: None)
    monkeypatch.setattr(preparation, "Preparation", lambda *_: SimpleNamespace(run=lambda: prepared.append(setup)))
    monkeypatch.setenv(pod_env.PIP, "einops")
    monkeypatch.setenv(pod_env.SETUP, setup)
    wakeup: Any = None
    with pytest.raises(SetupError, match=r"no such script: train\.py in "):
        start._run(start.Settings(("train.py",), work=str(tmp_path)), wakeup)
    assert prepared == ([setup] if setup else [])


def test_a_thread_that_ends_with_an_exception_says_so_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise ValueError("no reason: hunter2hunter2")

    lines: list[str] = []
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    start._tell_of_threads(lines.append, ["hunter2hunter2"])
    thread = threading.Thread(target=fail, name="telemetry")
    thread.start()
    thread.join()
    assert lines[0] == "the thread telemetry has ended with an exception, which is a bug in flk:"
    assert lines[-1] == "ValueError: no reason: ***"


def pieces(folder: Path, names: list[str], size: int = 100, link: str = "") -> str:
    """Write an archive of files with these names in pieces of ``size`` bytes, and return its hash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
        if link:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    data = buffer.getvalue()
    for number, begin in enumerate(range(0, len(data), size)):
        (folder / f"code.tar.gz.{number:03}").write_bytes(data[begin : begin + size])
    return hashlib.sha256(data).hexdigest()


def test_pieces_are_joined_in_order_and_unpacked(tmp_path: Path) -> None:
    names = ["train.py", "package/__init__.py", "package/deep/model.py"]
    digest = pieces(tmp_path, names, size=10)
    assert len(list(tmp_path.glob("code.tar.gz.*"))) > 10
    target = tmp_path / "work"
    assert unpack(tmp_path, target, digest) == 3
    assert [(target / name).read_text() for name in names] == names
    assert unpack(tmp_path, target, digest) == 3  # as in a container that was restarted


def test_another_archive_is_refused(tmp_path: Path) -> None:
    pieces(tmp_path, ["train.py"])
    with pytest.raises(SetupError, match="was submitted"):
        unpack(tmp_path, tmp_path / "work", "0" * 64)
    assert not (tmp_path / "work").exists()


def test_missing_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ship").mkdir()
    with pytest.raises(SetupError, match="no code"):
        unpack(tmp_path / "ship", tmp_path / "work", "")


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside-of-flk", "a/../../outside"])
def test_paths_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    digest = pieces(tmp_path, [name])
    with pytest.raises(SetupError, match="a link or a path outside its folder"):
        unpack(tmp_path, tmp_path / "work", digest)


@pytest.mark.parametrize("link", ["/etc/passwd", "../elsewhere", ".", "missing.py", "package"])
def test_links_to_anything_but_a_file_of_the_archive_are_refused(tmp_path: Path, link: str) -> None:
    digest = pieces(tmp_path, ["package/train.py"], link=link)
    with pytest.raises(SetupError, match="a link or a path outside its folder"):
        unpack(tmp_path, tmp_path / "work", digest)


def test_a_link_to_a_file_of_the_archive_is_one_in_the_pod(tmp_path: Path) -> None:
    digest = pieces(tmp_path, ["package/train.py"], link="package/train.py")
    for _ in range(2):  # as in a container that was restarted
        assert unpack(tmp_path, tmp_path / "work", digest) == 2
        assert (tmp_path / "work" / "link").resolve() == tmp_path / "work" / "package" / "train.py"
