"""The documentation's commands for a cluster print what it shows; tests/local runs those for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.documentation.outputs import run_page
from scripts.documentation.pages import all_pages, blocks
from tests.support.pages import name_of

PAGES = [page for page in all_pages() if any((b.key, b.value) == ("run", "cluster") for b in blocks(page))]
# The pages' jobs ask for no processors, so each rank would have a thread for each processor of the node. Such threads
# keep the processors busy while they wait for each other: the pods took twice the processor time.
ONE_PROCESSOR = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "one-processor"},
    "spec": {"limits": [{"type": "Container", "defaultRequest": {"cpu": "100m"}}]},
}


@pytest.mark.promise("Pages: What a page shows is what the commands print")
@pytest.mark.soak  # every pod of a page imports torch
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_for_a_cluster_print_what_the_page_shows(
    page: Path,
    image: str,
    shared_class: str,
    kubeconfig: Path,
    kubectl: Any,
    namespace: str,
    cache_home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    if "limit range" not in page.read_text():  # else it shows that there is none
        kubectl("create", "-f", "-", stdin=ONE_PROCESSOR)
    assert run_page(page, ["cluster"], check=True, cluster=(kubeconfig, namespace)) == 0, capsys.readouterr().out
