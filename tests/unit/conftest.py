"""The fake API server of a unit test, the kubeconfig that points to it, and the command line in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flk.__main__ import main
from flk.manifest import runtime
from flk.manifest.minify import minified
from tests.support.api_server import FakeApiServer, write_kubeconfig


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which flk archives jobs. Kubeconfig and cache, which all tests share, are not the user's either."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    return tmp_path / "state" / "flk" / "jobs"


@pytest.fixture(scope="session", autouse=True)
def minified_once() -> Iterator[None]:
    """Each source is minified once: it takes half of the processor time of each kind of archive that tests pack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "minified", functools.cache(minified))
        yield


@pytest.fixture
def fake() -> Iterator[FakeApiServer]:
    """A fake API server without objects and faults."""
    server = FakeApiServer()
    yield server
    server.close()


@pytest.fixture
def kubeconfig(fake: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kubeconfig in use; its context ``fake`` is the fake server's namespace ``team``."""
    path = write_kubeconfig(tmp_path / "kubeconfig", fake.url)
    monkeypatch.setenv("KUBECONFIG", str(path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.fixture
def run(
    fake: Any, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FLK_IMAGE", raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
