"""`flk report`: what it prints, which files it writes and refuses to replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flk.report import page
from tests.support.commands import Run
from tests.support.reports import job

FILE = "gpt.report.html"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    """A script that does not take seconds to make, and a job."""
    monkeypatch.setattr(page, "drawing_script", lambda: "window.drawn = 1;")
    job(2, 1, "gpt").add_to(fake)


def test_it_writes_a_file_and_prints_its_path(run: Run, tmp_path: Path) -> None:
    assert run("report", "gpt") == (0, f"{FILE}\n", "")
    assert "<!doctype html>" in (tmp_path / FILE).read_text()


def test_it_replaces_its_own_file_and_no_other(run: Run, tmp_path: Path) -> None:
    run("report", "gpt")
    assert run("report", "gpt")[0] == 0
    (tmp_path / FILE).write_text("<html>mine</html>")
    code, _, stderr = run("report", "gpt")
    assert (code, stderr.splitlines()[0]) == (2, f"error: {FILE} exists and was not made by flk report")
    assert (tmp_path / FILE).read_text() == "<html>mine</html>"
    assert run("report", "gpt", "--force")[0] == 0


def test_another_file(run: Run, tmp_path: Path) -> None:
    assert run("report", "gpt", "--to", "x.html")[1] == "x.html\n"
    assert not (tmp_path / FILE).exists()
    code, _, stderr = run("report", "gpt", "--to", "nowhere/x.html")
    assert (code, stderr) == (2, "error: nowhere/x.html cannot be written: No such file or directory\n")


def test_without_the_charts_it_says_so_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "drawing_script", lambda: None)
    code, stdout, stderr = run("report", "gpt")
    assert (code, stdout) == (0, f"{FILE}\n")
    assert stderr == f"flk: {page.MISSING}\n"
    assert (tmp_path / FILE).exists()


def test_no_such_job(run: Run, tmp_path: Path) -> None:
    code, stdout, stderr = run("report", "none")
    assert (code, stdout) == (102, "")
    assert stderr.startswith("error: there is no job none in namespace team")
    assert not list(tmp_path.glob("*.html"))
