"""`flk bench --local`: real ranks, one strategy after the other, and strategy auto with what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flk.local.bench import BenchResult
from tests.support.benchmark import SCRIPT
from tests.support.commands import Flk


@pytest.fixture
def flk(tmp_path: Path) -> Iterator[Flk]:
    command = Flk(tmp_path, home=tmp_path / "home")
    (tmp_path / "train.py").write_text(SCRIPT)
    yield command
    command.close()


@pytest.mark.promise("Planning: flk bench measures each strategy in the same pods")
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_strategies_are_measured_and_auto_uses_the_results(flk: Flk) -> None:
    done = flk(
        *("bench", "train.py", "--local", "--processes", "2", "--steps", "4", "--strategies", "ddp, full_shard"),
        *("-o", "json"),
    )
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["strategies"]) == {"ddp", "full_shard"}
    for measured in result["strategies"].values():
        assert measured["seconds"] > 0
        assert len(measured["memory"]) == 2
    # As if full_shard had been much faster, so that the outcome does not depend on this machine.
    times = {"strategies": {"ddp": {"seconds": 0.9}, "full_shard": {"seconds": 0.1}}}
    assert BenchResult(result | times).keep(flk.folder / "home" / ".local" / "state" / "flk" / "bench")
    trained = flk("run", "train.py", "--processes", "2", "--strategy", "auto")
    assert trained.code == 0, trained.stderr
    said = "strategy full_shard, chosen by auto: 100 ms for a step (measured by flk bench), ddp 900 ms"
    assert said in trained.stderr


@pytest.mark.promise("Planning: flk bench measures each strategy in the same pods")
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_strategy_that_fails_on_one_rank_does_not_stop_the_others(flk: Flk) -> None:
    done = flk(
        *("bench", "train.py", "--local", "--processes", "2", "--steps", "2", "--strategies", "full_shard,ddp"),
        *("--", "broken"),
    )
    assert done.code == 0, done.stderr
    assert "flk bench: full_shard: rank 1: exit code 1: MemoryError: rank 1 has no room" in done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert "failed: rank 1" in lines["full_shard"]
    assert " ms " in lines["ddp"]
    assert "fastest: --strategy ddp" in done.stdout
