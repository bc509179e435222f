"""The fake API server of a unit test, and the kubeconfig that points to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.api_server import FakeApiServer, write_kubeconfig


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which flk keeps the evidence of jobs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "flk" / "jobs"


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
