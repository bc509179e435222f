"""kubectl's global options: before and after the subcommand, and in hints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import write_kubeconfig
from tests.support.commands import Run


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
    assert "in namespace other" in run("-n", "other", "status", "nowhere")[2]
    assert "in namespace team" in run("status", "nowhere")[2]


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
    run("list", "--as", "ada")
    assert headers[-1]["Impersonate-User"] == "ada"


def test_request_timeout(fake: Any, run: Run) -> None:
    fake.fail(hang=True, times=9)
    code, _, stderr = run("--request-timeout", "1s", "list")
    assert code == 1
    assert "does not answer (tried 1 times in " in stderr  # for half a minute without it
    assert run("list", "--request-timeout", "soon")[0] == 2
