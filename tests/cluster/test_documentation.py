"""The documentation's commands for a cluster print what it shows; tests/local runs those for this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.documentation.outputs import run_page
from scripts.documentation.pages import ROOT, all_pages, blocks

PAGES = [page for page in all_pages() if any((b.key, b.value) == ("run", "cluster") for b in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_for_a_cluster_print_what_the_page_shows(
    page: Path,
    image: str,
    shared_class: str,
    kubeconfig: Path,
    namespace: str,
    cache_home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    assert run_page(page, ["cluster"], check=True, cluster=(kubeconfig, namespace)) == 0, capsys.readouterr().out
