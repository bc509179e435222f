"""The fake API server of a unit test, the kubeconfig that points to it, and the command line in this process."""

from __future__ import annotations

import functools
import itertools
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flk import cli
from flk.__main__ import main
from flk.kube import ConnectionOptions, set_connection_options
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.kube.kubeconfig import Context
from flk.manifest import bundle
from flk.observe.client import JobClient
from tests.support.api_server import FakeApiServer, write_kubeconfig
from tests.support.commands import Run

made = functools.cache(cli.load)


def load(name: str) -> Any:
    """A command that is made once: Typer takes as long for that as most tests to call it."""
    command = made(name)
    command.every = False  # which --help-all changes
    return command


cli.load = load
cli.application = functools.cache(cli.application)
bundle.runtime_archive = functools.cache(bundle.runtime_archive)  # each call reads and hashes the whole runtime


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of the tests of this process, each of which is made by the code that writes into it first."""
    folder = tmp_path_factory.mktemp("states")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def state_folder(states: Iterator[Path], cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which flk archives jobs. Kubeconfig and cache, which all tests share, are not the user's either."""
    own = next(states)
    monkeypatch.setenv("KUBECONFIG", str(own / "none"))
    monkeypatch.setenv("XDG_STATE_HOME", str(own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    monkeypatch.setattr("flk.kube.discovery.cache_folder", lambda: own)  # a port may have been another server's
    return own / "flk" / "jobs"


@pytest.fixture(autouse=True)
def default_options() -> Iterator[None]:
    """Other tests do not see the options of the connection that a command was given."""
    yield
    set_connection_options(ConnectionOptions())


@pytest.fixture
def utc() -> Iterator[None]:
    """Local time is UTC, whatever it is on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


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
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read of this machine's certificate authorities, which takes as long as most tests."""
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: None)


@pytest.fixture
def secure(monkeypatch: pytest.MonkeyPatch, no_authorities: None) -> None:
    """The connection to the fake server counts as encrypted, which it is not: flk sends credentials."""
    monkeypatch.setattr(Context, "is_secure", True)


@pytest.fixture
def client(kubeconfig: Path) -> JobClient:
    """The client of the fake server, which makes no pause between two requests."""
    return JobClient(ApiClient(connect(), sleep=lambda seconds: None))


@pytest.fixture
def run(fake: Any, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """Runs a command line: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FLK_IMAGE", raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
