"""The documentation's Python blocks run as they stand there, and its commands for this machine print what it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.documentation.outputs import run_page
from scripts.documentation.pages import ROOT, all_pages, blocks, python_script
from tests.support.pages import name_of, parameters

SCRIPTS = [page for page in all_pages() if python_script(page)]
CHECKED = ("data", "collectives")  # pages with tests of their own
LOCAL = [page for page in all_pages() if any((b.key, b.value) == ("run", "local") for b in blocks(page))]
# Every launcher on a page imports torch. These pages cover the kinds of commands; the soak runs the others too.
EVERY_TIME = (
    "docs/index.md",  # a script that fails
    "docs/guides/own-loop.md",  # flk's library, and a restart
)

NEEDS = ("accelerate", "lightning", "transformers")  # packages with a page of the same name


@pytest.mark.parametrize("page", [page for page in SCRIPTS if page.stem not in CHECKED], ids=name_of)
def test_python_blocks_run_on_two_ranks(page: Path, ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    elsewhere = "import os; os.chdir(os.path.dirname(__file__))\n"  # some blocks write files
    ranks(elsewhere + python_script(page), 2, {"FLK_CHECKPOINT": str(tmp_path / "checkpoints")})


def test_the_page_on_data_reads_every_epoch(ranks: Callable[..., list[Any]]) -> None:
    checks = "assert stream.epoch == 1 and loader.epoch == 2"
    ranks(python_script(ROOT / "docs" / "guides" / "data.md") + checks, 2)


def test_the_page_on_collectives_gives_what_it_says(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    checks = """
assert mean == 0.25 and metrics["loss"] == 0.5 and metrics["right"].tolist() == [6, 8], metrics
"""
    checkpoint = {"FLK_CHECKPOINT": str(tmp_path / "checkpoints")}
    ended = ranks(python_script(ROOT / "docs" / "concepts" / "collectives.md") + checks, 2, checkpoint)
    printed = [[line for line in one.lines if not line.startswith('{"step"')] for one in ended]
    assert printed == [["3 ['a', 'b', 'c']", "only on rank 0 of all nodes"], ["2 ['d', 'e']"]]


def test_the_pages_that_run_every_time_have_commands_for_this_machine() -> None:
    assert set(EVERY_TIME) <= {name_of(page) for page in LOCAL}


@pytest.mark.promise("Pages: What a page shows is what the commands print")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", parameters(LOCAL, EVERY_TIME), ids=name_of)
def test_commands_for_this_machine_print_what_the_page_shows(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(page.stem)
    assert run_page(page, ["local"], check=True) == 0, capsys.readouterr().out
