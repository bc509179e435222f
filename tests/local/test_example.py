from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
TINY = ["--batch-size", "4", "--block", "16", "--layers", "1", "--heads", "2", "--width", "16"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(
    launcher: list[str], *options: str, checkpoint: Path | None = None, **variables: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """The metrics that the example prints, and its other lines: where each rank runs, and notices."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("FLK_", "TORCHELASTIC_", "PET_"))
    }
    environment = {**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    if checkpoint:
        environment["FLK_CHECKPOINT"] = str(checkpoint)
    command = [sys.executable, *launcher, str(EXAMPLE), *TINY, *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    lines = re.sub(r"^\[rank \d+\] ", "", ended.stdout, flags=re.MULTILINE).splitlines()
    metrics = [line for line in lines if line.startswith('{"step"')]
    return [json.loads(line) for line in metrics], sorted(line for line in lines if line not in metrics)


def test_under_torchrun_and_resumed_under_python(tmp_path: Path) -> None:
    together, notices = start(TORCHRUN, "--steps", "20", checkpoint=tmp_path)
    first, *steps, last = together
    assert (first["processes"], first["characters"], first["vocabulary"]) == (2, 411466, 96)
    assert first["data"] == "cbab6341ae5d69bf"  # or this Python's standard library has another text
    assert [line["step"] for line in steps] == [10, 20]
    assert 4.3 < first["heldout_loss"] < 4.7
    assert last["heldout_loss"] < first["heldout_loss"] - 0.3
    assert [json.loads(line)["rank"] for line in notices] == [0, 1]

    alone, notices = start([], "--steps", "30", checkpoint=tmp_path)
    assert notices[0] == f"flk: resumed at step 20 from {tmp_path}/step-000000020"
    assert [line["step"] for line in alone] == [20, 30, 30]
    assert abs(alone[0]["heldout_loss"] - last["heldout_loss"]) < 1e-4

    ended, notices = start([], "--steps", "30", checkpoint=tmp_path)
    assert [line["step"] for line in ended] == [30, 30]
    assert ended[-1]["heldout_loss"] == alone[-1]["heldout_loss"]


def test_the_same_seed_gives_the_same_loss() -> None:
    assert start([], "--steps", "3")[0][-1] == start([], "--steps", "3")[0][-1]


def test_sharded_it_trains_the_same() -> None:
    losses = {}
    for strategy in ("ddp", "full_shard"):
        variables = {"FLK_PROCESSES": "3", "FLK_STRATEGY": strategy}
        metrics, _ = start(["-m", "flk_runtime"], "--steps", "10", "--layers", "2", **variables)
        losses[strategy] = [line.get("heldout_loss", line.get("loss")) for line in metrics]
    assert len(losses["ddp"]) == 3
    assert losses["full_shard"] == pytest.approx(losses["ddp"], abs=1e-4)
