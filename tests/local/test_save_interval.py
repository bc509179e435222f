"""save_every="auto" with real ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL

SCRIPT = (
    SMALL_MODEL
    + """
with flk.init(strategy="ddp", checkpoint=os.environ["BASE"], save_every="auto", keep=9, log_every=0) as run:
    model, optimizer = run.parallelize(*build())
    for words in data(25, 1):
        optimizer.zero_grad()
        loss_of(model, words[0, 0]).backward()
        optimizer.step()
        run.step()
"""
)


def test_ranks_save_after_the_same_computed_steps(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(SCRIPT, 2, {"BASE": str(tmp_path)})
    lines = [line for line in results[0].output.splitlines() if "saving every" in line]
    assert len(lines) == 1
    assert "a failure is expected every" in lines[0]
    found = {folder.name for folder in tmp_path.glob("step-*")}
    assert found == {"step-000000010", "step-000000020", "step-000000025"}
