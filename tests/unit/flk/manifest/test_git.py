"""Git is asked about the commit, and runs no program that the folder names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flk.manifest.files import select_files
from flk.manifest.git import commit_of
from flk.spec.job import Job


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What a program of the folder makes."""
    return tmp_path / "RAN"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a submodule, and with a file whose size git has to read anew."""
    for name in ("inner", "outer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text("1\n")
        (tmp_path / name / ".gitattributes").write_text("*.py filter=evil diff=evil\n")
        git(tmp_path / name, "init", "-q")
        if name == "outer":
            git(tmp_path / name, "submodule", "add", "-q", str(tmp_path / "inner"), "lib")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-q", "-m", "a")
    for folder in (tmp_path / "outer", tmp_path / "outer" / "lib"):
        (folder / "train.py").write_text("2\n")
        os.utime(folder / "train.py", (1, 1))
    return tmp_path / "outer"


SETTINGS = {
    "core.fsmonitor": "{}",
    "core.hooksPath": "../hooks",
    "core.pager": "{}",
    "pager.diff": "{}",
    "filter.evil.clean": "{}",
    "filter.evil.process": "{}",
    "filter.evil.required": "true",
    "diff.evil.textconv": "{}",
    "diff.evil.command": "{}",
    "diff.external": "{}",
}
REMOTE = {
    "core.repositoryFormatVersion": "1",
    "extensions.partialClone": "origin",
    "remote.origin.url": "ext::{}",
    "remote.origin.promisor": "true",
    "protocol.ext.allow": "always",
}


@pytest.mark.parametrize(("settings", "folder"), [(SETTINGS, ""), (SETTINGS, "lib"), (REMOTE, "")])
def test_no_program_of_the_folder_runs(settings: dict[str, str], folder: str, checkout: Path, ran: Path) -> None:
    program = ran.parent / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    (checkout / "hooks").mkdir()
    for hook in ("post-index-change", "post-checkout", "pre-commit"):
        (checkout / "hooks" / hook).symlink_to(program)
    for key, value in settings.items():
        git(checkout / folder, "config", key, value.format(program))
    if settings is REMOTE:  # an object is missing, which git would get from there
        for path in (checkout / ".git" / "objects").rglob("??/*"):
            path.unlink()
    before = ran.exists()
    commit_of(checkout)
    select_files(Job(command=["train.py"]), checkout)
    assert not before
    assert not ran.exists()


def test_a_filter_whose_name_no_option_can_take_away(checkout: Path, ran: Path) -> None:
    (checkout / ".gitattributes").write_text("*.py filter=a=b\n")
    git(checkout, "config", "filter.a=b.clean", f"touch {ran}")
    assert commit_of(checkout) == ""
    assert not ran.exists()


def test_the_users_own_filters_count(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text('[filter "evil"]\n clean = "sed s/2/1/"\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    assert not commit_of(checkout).endswith("-dirty")


def test_what_a_hook_of_another_repository_is_told_does_not_count(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = commit_of(checkout), select_files(Job(command=["train.py"]), checkout)
    for name, path in (("GIT_DIR", "inner/.git"), ("GIT_WORK_TREE", "inner"), ("GIT_INDEX_FILE", "inner/.git/index")):
        monkeypatch.setenv(name, str(tmp_path / path))
    assert (commit_of(checkout), select_files(Job(command=["train.py"]), checkout)) == before


def git_text(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def plain_checkout(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    return tmp_path


def test_the_commit_and_whether_files_differ(plain_checkout: Path) -> None:
    head = git_text(plain_checkout, "rev-parse", "HEAD").strip()
    assert commit_of(plain_checkout) == head
    (plain_checkout / "train.py").write_text("2\n")
    assert commit_of(plain_checkout) == f"{head}-dirty"


def test_a_folder_without_a_commit_has_none(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) == ""


def test_without_git_there_is_none(plain_checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit_of(plain_checkout) == ""
