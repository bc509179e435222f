"""kubectl's global options: before and after the subcommand, in hints, and what they show of requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flk.kube import ConnectionOptions, set_connection_options
from tests.support.api_server import TOKEN, write_kubeconfig
from tests.support.commands import Run
from tests.support.jobs import JobBuilder


@pytest.fixture(autouse=True)
def default_options() -> Iterator[None]:
    """Other tests must not see the options of these."""
    yield
    set_connection_options(ConnectionOptions())


@pytest.mark.promise("Clusters: The client authenticates as kubectl does, and its credentials go nowhere else")
@pytest.mark.parametrize(
    "words",
    [
        ["-n", "team", "--context", "fake", "status", "nowhere"],
        ["status", "-n", "team", "--context", "fake", "nowhere"],
        ["-n", "other", "--context", "another", "status", "nowhere", "-n", "team", "--context", "fake"],
    ],
)
def test_options_before_and_after_the_subcommand(fake: Any, run: Run, words: list[str]) -> None:
    code, _, stderr = run(*words)
    assert code == 102
    assert "there is no job nowhere in namespace team" in stderr
    assert "flk list -n team --context fake lists" in stderr


def test_options_of_one_command_line_do_not_reach_the_next(fake: Any, run: Run) -> None:
    assert "in namespace other" in run("-n", "other", "-v", "status", "nowhere")[2]
    stderr = run("status", "nowhere")[2]
    assert "in namespace team" in stderr
    assert "GET" not in stderr


def test_kubeconfig_is_named_in_hints(fake: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_kubeconfig(tmp_path / "my config", fake.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    code, _, stderr = run("--kubeconfig", str(path), "status", "nowhere")
    assert code == 102
    assert f"flk list -n team --kubeconfig '{path}' lists" in stderr
    code, _, stderr = run("status", "nowhere", "--kubeconfig", str(tmp_path / "gone"))
    assert code == 1
    assert "gone does not exist" in stderr


def test_impersonation(fake: Any, run: Run, secure: None) -> None:
    headers: list[Any] = []
    fake.heard = headers.append
    run("list", "--as", "ada", "--as-group", "a", "--as-group", "b")
    assert headers[-1]["Impersonate-User"] == "ada"
    assert headers[-1].get_all("Impersonate-Group") == ["a", "b"]
    code, _, stderr = run("--as-group", "a", "list")
    assert code == 1
    assert "of no user" in stderr


def test_a_server_and_a_token_need_no_kubeconfig(
    fake: Any, run: Run, secure: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    headers: list[Any] = []
    fake.heard = headers.append
    fake.fail(401)  # the credentials are read again
    code, _, stderr = run("--server", fake.url, "--token", "of-a-robot", "-n", "team", "status", "nowhere")
    assert code == 102
    assert headers[-1]["Authorization"] == "Bearer of-a-robot"
    assert f"flk list -n team --server {fake.url} lists" in stderr
    assert "of-a-robot" not in stderr
    assert "https://api.example.com:6443" in run("--server", "api.example.com", "list")[2]


def test_cluster_and_user_of_the_kubeconfig(
    fake: Any, run: Run, secure: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_kubeconfig(tmp_path / "config", "https://elsewhere")
    config = json.loads(path.read_text())
    config["clusters"].append({"name": "east", "cluster": {"server": fake.url}})
    config["users"].append({"name": "robot", "user": {"token": "r", "as": "ada"}})
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    headers: list[Any] = []
    fake.heard = headers.append
    assert run("list", "--cluster", "east", "--user", "robot")[0] == 0
    assert headers[-1]["Authorization"] == "Bearer r"
    assert run("list", "--cluster", "east", "--user", "robot", "--token", "t")[0] == 0
    assert (headers[-1]["Authorization"], headers[-1]["Impersonate-User"]) == ("Bearer t", "ada")
    code, _, stderr = run("list", "--cluster", "eats")
    assert (code, "has no cluster 'eats'" in stderr, "did you mean east?" in stderr) == (1, True, True)
    assert "has no user 'x'" in run("list", "--user", "x")[2]


def test_request_timeout(fake: Any, run: Run) -> None:
    fake.fail(hang=True, times=9)
    began = time.monotonic()
    code, _, stderr = run("--request-timeout", "1s", "list")
    assert code == 1
    assert "does not answer" in stderr
    assert time.monotonic() - began < 5
    assert run("list", "--request-timeout", "soon")[0] == 2


def test_verbose_shows_requests_without_secrets(fake: Any, run: Run) -> None:
    JobBuilder().add_to(fake)
    stderr = run("status", "gpt", "-v")[2]
    assert f"flk: GET {fake.url}/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/gpt: 200 after" in stderr
    assert TOKEN not in stderr
    fake.fail(0, times=9)
    assert "/pytorchjobs/gpt: no answer after" in run("-v", "--request-timeout", "1s", "status", "gpt")[2]
