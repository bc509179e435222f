"""`flk report`: what it prints, which files it writes and refuses to replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flk.observe.client import JobClient
from flk.report import script
from flk.report.server import ReportServer
from tests.support.api_server import FakeApiServer
from tests.support.commands import Run
from tests.support.reports import job

FILE = "gpt.report.html"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    """A script that does not take seconds to make, and two jobs."""
    monkeypatch.setattr(script, "drawing_script", lambda: "window.drawn = 1;")
    for name in ("gpt", "small"):
        job(2, 1, name).add_to(fake)


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
    assert run("report", "gpt", "-o", "x.html")[1] == "x.html\n"
    assert not (tmp_path / FILE).exists()
    code, _, stderr = run("report", "gpt", "-o", "nowhere/x.html")
    assert (code, stderr) == (2, "error: --output: nowhere/x.html cannot be written: No such file or directory\n")


def test_two_jobs_are_one_page(run: Run, tmp_path: Path) -> None:
    assert run("report", "gpt", "small")[1] == "gpt-small.report.html\n"
    assert "Comparison of 2 jobs" in (tmp_path / "gpt-small.report.html").read_text()


def test_data(run: Run, tmp_path: Path) -> None:
    code, stdout, _ = run("report", "gpt", "-o", "json")
    assert (code, json.loads(stdout)["schema"]) == (0, "flk.dev/report/v1")
    assert [each["state"]["name"] for each in json.loads(run("report", "gpt", "small", "-o", "json")[1])["items"]] == [
        "gpt", "small"
    ]  # fmt: skip
    assert run("report", "gpt", "-o", "yaml")[1].startswith("schema: flk.dev/report/v1\n")
    assert not list(tmp_path.glob("*.html"))


def test_without_the_charts_it_says_so_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "drawing_script", lambda: None)
    code, stdout, stderr = run("report", "gpt")
    assert (code, stdout) == (0, f"{FILE}\n")
    assert stderr == f"flk: {script.MISSING}\n"
    assert (tmp_path / FILE).exists()


def test_of_a_job_that_is_gone_a_page_that_is_renewed_tells_once(
    run: Run, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("report", "gpt", "-o", "json")
    fake.delete_all()
    connected: list[str] = []
    connect = JobClient.connect

    def counted(context: str | None, namespace: str | None) -> JobClient:
        connected.append("once")
        return connect(context, namespace)

    def serve(server: ReportServer) -> None:
        for _ in range(3):
            server._collect()
        raise KeyboardInterrupt

    monkeypatch.setattr(JobClient, "connect", counted)
    monkeypatch.setattr(ReportServer, "serve", serve)
    code, _, stderr = run("report", "gpt", "--serve")
    assert (code, stderr.count("job gpt is gone"), connected) == (130, 1, ["once"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "c"], "JOB: must be one job or 2 different ones (is a b c)"),
        (["a", "a"], "JOB: must be one job or 2 different ones (is a a)"),
        (["gpt", "-o", "train.py"], "--output: must be json, yaml or a file that ends in .html (is 'train.py')"),
        (["gpt", "--serve", "-o", "x.html"], "--serve and --output exclude each other"),
        (["gpt", "--port", "8000"], "--port needs --serve"),
        (["none"], "there is no job none in namespace team"),
        (["none", "--serve"], "there is no job none in namespace team"),
    ],
)
def test_mistakes(run: Run, tmp_path: Path, words: list[str], message: str) -> None:
    code, stdout, stderr = run("report", *words)
    assert (code in (2, 102), stdout) == (True, "")
    assert stderr.startswith(f"error: {message}")
    assert not list(tmp_path.glob("*.html"))
