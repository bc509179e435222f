"""The commit of the code, as a job's annotation has it, and how the code differs from it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flk.manifest.commit import DIFF_LIMIT, commit_of, diff_of


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    return tmp_path


def test_the_commit_and_whether_files_differ(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert commit_of(checkout) == head
    (checkout / "train.py").write_text("2\n")
    assert commit_of(checkout) == f"{head}-dirty"


def test_a_folder_without_a_commit_has_none(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) == ""


def test_without_git_there_is_none(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit_of(checkout) == ""
    assert diff_of(checkout) == ""


def test_the_diff_to_the_commit_is_bounded(checkout: Path) -> None:
    assert diff_of(checkout) == ""
    git(checkout, "config", "color.diff", "always")
    (checkout / "train.py").write_text("2\n")
    assert diff_of(checkout).splitlines()[-2:] == ["-1", "+2"]
    (checkout / "other").mkdir()
    assert diff_of(checkout / "other") == ""  # of a folder in a large repository
    (checkout / "train.py").write_text("".join(f"{number}\n" for number in range(50_000)))
    lines = diff_of(checkout).splitlines()
    assert len("\n".join(lines[:-1])) <= DIFF_LIMIT
    assert lines[-1].endswith(" more characters are left out)")
