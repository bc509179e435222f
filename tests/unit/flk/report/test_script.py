"""The script that draws charts: made once for each version, and optional."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk.report.script import drawing_script


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The calls of a package that stands in for vl-convert, which takes seconds."""
    calls: list[str] = []

    def bundle(snippet: str) -> str:
        calls.append(snippet)
        return 'x = "</script>"'

    package = SimpleNamespace(javascript_bundle=bundle)
    monkeypatch.setattr("importlib.metadata.version", {"vl-convert-python": "1.9"}.__getitem__)
    monkeypatch.setitem(sys.modules, "vl_convert", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_it_is_made_once_and_ends_no_element(made: list[str]) -> None:
    first, second = drawing_script(), drawing_script()
    assert first == second == 'x = "<\\/script>"'
    assert made == ["window.vegaEmbed = vegaEmbed;"]


def test_a_cache_that_cannot_be_written_does_not_matter(made: list[str], tmp_path: Path) -> None:
    (tmp_path / "flk").write_text("a file in the place of the folder")
    assert drawing_script() == drawing_script()
    assert made == ["window.vegaEmbed = vegaEmbed;"] * 2


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert drawing_script() is None
