"""What `flk plan` prints of rows whose times can be compared, and of rows that leave something out."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from flk.cli.plan import _text
from flk.local.places import packages_folder
from flk.local.plan import Plan, Row, _installed
from flk.spec.job import Job
from tests.support.requirements import with_torch


def row(strategy: str, seconds: float) -> Row:
    values: dict[str, Any] = {each.name: 1 for each in fields(Row)}
    words = {"strategy": strategy, "fits": True, "modelled": True}
    return Row(**{**values, **words, "step_seconds": seconds, "mfu": None})


def test_rows_that_leave_something_out_are_marked_and_none_is_recommended() -> None:
    rows = [row("full_shard", 2.0), row("ddp", 3.0)]
    plan = Plan(1, 8, "H100", 1 << 30, rows, [], [], ["no formula"], {})
    assert "recommended: --strategy full_shard (the fastest that fits: ddp takes 50% longer)" in _text(plan)
    marked = replace(plan, rows=[replace(each, modelled=False) for each in rows])
    text = _text(marked)
    assert "2 s ?" in text[3]
    assert not any(line.startswith("recommended") for line in text)
    assert any(line.startswith("no recommendation") and "full_shard needs least memory" in line for line in text)


def test_where_nothing_fits_the_options_are_named_that_the_script_can_use() -> None:
    rows = [replace(row("full_shard", 2.0), fits=False)]
    text = _text(Plan(1, 8, "T4", 1 << 30, rows, ["recompute=True"], [], [], {}))
    assert "use a smaller micro-batch, recompute=True, more GPUs, or GPUs with more memory" in text[-2]


def test_a_script_that_never_reaches_its_first_step_is_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "flk_plan.py").write_text("import signal\n\nsignal.pause()\n")
    monkeypatch.setattr("flk.local.plan.interpreter", lambda: (sys.executable, str(tmp_path)))
    monkeypatch.setattr("flk.local.plan.LIMIT", 0.5)
    code, stdout, stderr = run("plan", "train.py")
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: the script did not reach its first step within 0.5 s\nhint: ")


@with_torch
def test_packages_are_those_that_flk_run_has_installed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    code, stdout, stderr = run("plan", "--pip", "einops", "train.py")
    assert (code, stdout) == (2, "")
    assert "the packages of the job (einops) are not installed on this machine, and flk plan installs none" in stderr
    assert not (tmp_path / "cache").exists()
    job = Job(command=["train.py"], pip=["einops"])
    folder = packages_folder(job, tmp_path, sys.executable, os.environ)
    site = folder / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (folder / "installed").touch()
    assert _installed(job, tmp_path, sys.executable) == str(site)
