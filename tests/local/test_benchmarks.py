"""Each benchmark still runs from end to end. Their results are not judged: one round is too few."""

from __future__ import annotations

from pathlib import Path

import pytest

import measure
import run_all
from measure import Verdict

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", run_all.NAMES)
def test_benchmark_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    results, code = run_all.run(name, rounds=1)
    if code == measure.SKIPPED:
        pytest.skip("this machine cannot run it; its output says why")
    assert code == 0
    assert results
    assert {result.verdict for result in results} == {Verdict.NOT_JUDGED}
