"""save_every="auto" and store_every="auto" with real ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL

SCRIPT = (
    SMALL_MODEL
    + """
def train(folder, **intervals):
    place = os.path.join(os.environ["BASE"], folder)
    with flk.init(strategy="ddp", checkpoint=place, save_every="auto", keep=9, log_every=0, **intervals) as run:
        model, optimizer = run.parallelize(*build())
        for words in data(25, 1):
            optimizer.zero_grad()
            loss_of(model, words[0, 0]).backward()
            optimizer.step()
            run.step()

dist.init_process_group("gloo")
train("one")
train("two", store_every="auto")
dist.destroy_process_group()
"""
)


def test_ranks_save_after_the_same_computed_steps(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(SCRIPT, 2, {"BASE": str(tmp_path)})
    for verb, name in (("saving", "one"), ("storing", "two")):  # without memory, the interval of storage counts
        lines = [line for line in results[0].output.splitlines() if f"{verb} every" in line]
        assert len(lines) == 1
        assert "a failure is expected every" in lines[0]
        found = {folder.name for folder in (tmp_path / name).glob("step-*")}
        assert found == {"step-000000010", "step-000000020", "step-000000025"}
