"""Packages, requirements and the setup command: what is refused, and which files travel."""

from __future__ import annotations

from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.manifest.bundle import make_bundle
from flk.manifest.files import requirement_files
from flk.spec.job import validated
from tests.support.commands import Run

HASHED = "a==1 --hash=sha256:00\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pip", "-r"], "--pip: must be a package for pip; options like '-r' go into a file of --requirements"),
        (["--pip", "a b"], "--pip: must be one package each time (is 'a b')"),
        (["--pip", "a[x] b>=1"], "--pip: must be one package each time (is 'a[x] b>=1')"),
        (["--pip", ""], "--pip: must be a package for pip, like torchmetrics>=1.4 (is '')"),
        (["--pip", "a\nb"], "--pip: must be a package for pip, like torchmetrics>=1.4 (is 'a\\nb')"),
        (["--setup", " "], "--setup: must be a shell command, not empty"),
        (["--requirements", "/"], "--requirements: must be the path of a file (is '/')"),
        (["--requirements", "../a.txt"], "--requirements: must not contain '..'"),
        (["--requirements", "none.txt"], "requirements: there is no file none.txt in "),
        (["--requirements", "folder"], "requirements: folder cannot be read: Is a directory"),
        (["--requirements", "outer.txt"], "outer.txt:2: ../up.txt is outside of "),
        (["--requirements", "inner.txt"], "inner.txt:1: there is no file folder/none.txt in "),
        (["--requirements", "hashed.txt", "--pip", "b"], "pip: b has no hash, and hashed.txt has hashes"),
    ],
)
@pytest.mark.parametrize("command", ["run", "render"])
def test_a_mistake_is_refused_in_one_line_before_anything_starts(
    run: Run, command: str, flags: list[str], message: str
) -> None:
    files = {"train.py": "", "outer.txt": "a\n-r ../up.txt\n", "inner.txt": "-c folder/none.txt", "hashed.txt": HASHED}
    for name, text in files.items():
        Path(name).write_text(text)
    Path("folder").mkdir()
    code, stdout, stderr = run(command, "train.py", *flags)
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"error: {message}")


def test_included_files_travel_with_the_requirements(tmp_path: Path) -> None:
    folder = tmp_path / "needs"
    folder.mkdir()
    (tmp_path / "train.py").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / "pins.in").write_text("b==1\n")
    (folder / "more.txt").write_text("-c ../pins.in\n--requirement=https://example.com/r.txt\n -rmore.txt\n")
    (folder / "all.txt").write_text("a\n-r more.txt  # and more\n")
    assert requirement_files("needs/all.txt", tmp_path) == ["needs/all.txt", "needs/more.txt", "pins.in"]
    (tmp_path / ".git").rmdir()
    job = validated({"command": "train.py", "requirements": "needs//all.txt"})
    assert {"needs/all.txt", "needs/more.txt", "pins.in", "train.py"} <= {*make_bundle(job, tmp_path).files}


def test_an_absolute_path_is_not_looked_up_before_the_job_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    job = validated({"command": "train.py", "requirements": "/nowhere//r.txt"})
    assert job.requirements == "/nowhere/r.txt"
    assert make_bundle(job, tmp_path).files == ("train.py",)
    with pytest.raises(UsageError, match="there is no file /nowhere/r"):
        requirement_files("/nowhere/r.txt", tmp_path)
