"""Completion of shells: commands, and the names of jobs of the namespace that the words so far choose."""

from __future__ import annotations

from typing import Any

import pytest

from flk.__main__ import main
from flk.cli import options
from tests.support.jobs import JobBuilder

BASH = {"_FLK_COMPLETE": "complete_bash"}
ZSH = {"_FLK_COMPLETE": "complete_zsh"}
FISH = {"_FLK_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


@pytest.fixture
def complete(kubeconfig: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """What a shell is told when the user presses the tabulator after these words."""

    def run(shell: dict[str, str], words: str) -> str:
        count = str(len(words.split(" ")) - 1)
        for name, value in {**shell, "COMP_WORDS": words, "COMP_CWORD": count, "_TYPER_COMPLETE_ARGS": words}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            main([])
        return str(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("shell", [BASH, ZSH, FISH])
@pytest.mark.parametrize("command", ["status", "logs", "wait", "delete", "why", "suspend"])
def test_names_of_jobs(
    fake: Any, complete: Any, monkeypatch: pytest.MonkeyPatch, shell: dict[str, str], command: str
) -> None:
    monkeypatch.setattr(
        options, "COMPLETION_TIMEOUT", 30.0
    )  # what is shown here does not depend on how busy the machine is
    for name in ("gpt-a", "gpt-b", "llama"):
        JobBuilder(name=name).add_to(fake)
    found = complete(shell, f"flk {command} gp")
    assert "gpt-a" in found
    assert "gpt-b" in found
    assert "llama" not in found


def test_context_and_namespace_of_the_words_count(fake: Any, complete: Any) -> None:
    JobBuilder().add_to(fake)
    assert complete(BASH, "flk -n team --context fake status ").split() == ["gpt"]
    assert complete(BASH, "flk status -n other ").split() == []
    assert complete(BASH, "flk --context nowhere status ").split() == []


def test_server_sends_only_the_metadata_to_the_user_of_the_words(fake: Any, complete: Any) -> None:
    headers: list[Any] = []
    fake.heard = headers.append
    complete(BASH, "flk --as ada status ")
    asked = [sent["Accept"] for sent in headers if "APIGroupDiscoveryList" not in sent["Accept"]]
    assert asked
    assert all("as=PartialObjectMetadataList" in accepted for accepted in asked)
    assert headers[-1]["Impersonate-User"] == "ada"


def test_cluster_that_fails_completes_nothing(fake: Any, complete: Any) -> None:
    fake.fail(0, times=50)
    assert complete(BASH, "flk status ").split() == []


def test_commands(complete: Any) -> None:
    assert complete(BASH, "flk sus").split() == ["suspend"]
