"""The example of a GPT as one process and as several ranks, which are forks of a process with torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
TINY = ["--batch-size", "4", "--block", "16", "--layers", "1", "--heads", "2", "--width", "16"]

Start = Callable[..., tuple[list[dict[str, Any]], list[str]]]


@pytest.fixture
def start(ranks: Ranks) -> Start:
    """Runs the example: ``start(world_size, *options, **variables)``.

    Returns the metrics that it prints, and its other lines: where each rank runs, and notices.
    """

    def run(world_size: int, *options: str, **variables: str) -> tuple[list[dict[str, Any]], list[str]]:
        arguments = [str(EXAMPLE), *TINY, *options]
        script = f"import runpy, sys\nsys.argv = {arguments}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        ended = ranks(script, world_size, {"CUDA_VISIBLE_DEVICES": "", **variables})
        lines = [line for rank in ended for line in rank.lines]
        metrics = [line for line in lines if line.startswith('{"step"')]
        return [json.loads(line) for line in metrics], sorted(line for line in lines if line not in metrics)

    return run


def test_on_two_ranks_and_resumed_in_one_process(start: Start, tmp_path: Path) -> None:
    checkpoint = {"FLK_CHECKPOINT": str(tmp_path)}
    together, notices = start(2, "--steps", "20", **checkpoint)
    first, told, *steps, last = together
    assert (first["processes"], first["characters"], first["vocabulary"]) == (2, 411466, 96)
    assert first["data"] == "cbab6341ae5d69bf"  # or this Python's standard library has another text
    assert told == {"step": 0, "total": 20}
    assert [line["step"] for line in steps] == [10, 20]
    assert 4.3 < first["heldout_loss"] < 4.7
    assert last["heldout_loss"] < first["heldout_loss"] - 0.3
    assert [json.loads(line)["rank"] for line in notices] == [0, 1]

    alone, notices = start(1, "--steps", "30", **checkpoint)
    assert notices[0] == f"flk: resumed at step 20 from {tmp_path}/step-000000020"
    assert [line["step"] for line in alone] == [20, 30, 30]
    assert abs(alone[0]["heldout_loss"] - last["heldout_loss"]) < 1e-4

    ended, notices = start(1, "--steps", "30", **checkpoint)
    assert [line["step"] for line in ended] == [30, 30]
    assert ended[-1]["heldout_loss"] == alone[-1]["heldout_loss"]
