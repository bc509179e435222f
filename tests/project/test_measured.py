"""Whether the results say, at each table, if the code has changed since it was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import measured
import run_all
from measured import CHANGED, UNKNOWN, HistoryError

RESULTS = run_all.ROOT / "benchmarks" / "results.md"
IDENTITY = ("-c", "user.name=ada", "-c", "user.email=ada@example.com", "-c", "commit.gpgsign=false")


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *IDENTITY, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, str]:
    """A repository with the code of two benchmarks, and the commit that they were measured on."""
    root = tmp_path / "history"
    files = {
        "benchmarks/loop.py": "import launch\n",
        "benchmarks/launch.py": "import sys\nfrom measure import progress\n",
        "benchmarks/measure.py": "import launch\n",
        "benchmarks/streams.py": "first\n",
        "runtime/flk_runtime/data/loader.py": "first\n",
        "README.md": "first\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root.parent, "init", "--quiet", str(root))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root, git(root, "rev-parse", "--short", "HEAD")


def page(commit: str, mark: str = "") -> str:
    line = f"Measured on commit {commit}, load average 1.0, 2.0, 3.0, 2 cores, Python 3.11.7, torch 2.13.0+cpu.{mark}"
    return f"before\n\n### streams\n\n{line}\n\n| what |\n| --- |\n| a / b |\n\nafter\n"


def test_a_table_is_marked_once_its_code_has_changed_and_loses_the_mark_with_a_new_measurement(
    history: tuple[Path, str],
) -> None:
    root, commit = history
    (root / "README.md").write_text("no code\n")
    assert measured.marked(page(commit), root) == page(commit)
    (root / "runtime/flk_runtime/data/loader.py").write_text("second\n")
    once = measured.marked(page(commit), root)
    assert once == page(commit, f" {CHANGED}")
    assert measured.marked(once, root) == once
    git(root, "commit", "--quiet", "--all", "--message", "second")
    assert measured.marked(once, root) == once
    now = git(root, "rev-parse", "--short", "HEAD")
    assert measured.marked(page(now, f" {CHANGED}"), root) == page(now)


@pytest.mark.parametrize("helper", ["launch", "measure"])
def test_a_module_that_a_script_imports_counts_for_it_only(history: tuple[Path, str], helper: str) -> None:
    root, commit = history
    (root / f"benchmarks/{helper}.py").write_text("second\n")
    assert measured.changes("loop", commit, root) == CHANGED
    assert measured.changes("streams", commit, root) == ""


def test_the_code_of_every_benchmark_is_named_and_exists() -> None:
    assert list(measured.CODE) == list(run_all.NAMES)
    for name, paths in measured.CODE.items():
        for path in paths:
            assert (run_all.ROOT / path).exists(), f"{name}: {path}"


def test_a_page_says_which_tables_are_older_than_their_code() -> None:
    text = RESULTS.read_text()
    try:
        expected = measured.marked(text, run_all.ROOT)
    except HistoryError as error:
        pytest.skip(str(error))
    if expected.count(UNKNOWN) > text.count(UNKNOWN):
        pytest.skip("this history lacks commits that the results name")
    assert text == expected, "`python benchmarks/run_all.py --mark benchmarks/results.md` marks them anew"
