"""flk.save and flk.restore keep what flk promises for a run: options, phases, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks

SAVES = """
    import os, torch
    import flk_runtime as flk

    model = torch.nn.Linear(2, 2)
    for step in range(1, 8):
        flk.save(step, model=model, wait=True)
        flk.save(step, os.environ["FLK_CHECKPOINT"] + "-best", model=model, wait=True)
"""


def test_as_many_checkpoints_stay_as_the_variables_say(ranks: Ranks, tmp_path: Path) -> None:
    variables = {"FLK_CHECKPOINT": str(tmp_path / "all"), "FLK_KEEP": "3", "FLK_KEEP_EVERY": "2"}
    ranks(SAVES, 1, variables)
    for place in ("all", "all-best"):
        assert sorted(int(path.name[5:]) for path in (tmp_path / place).glob("step-*")) == [2, 4, 5, 6, 7]


@pytest.mark.parametrize("name", ["FLK_KEEP", "FLK_KEEP_EVERY"])
def test_a_number_of_checkpoints_that_is_none_is_refused_by_name(ranks: Ranks, tmp_path: Path, name: str) -> None:
    (result,) = ranks(SAVES, 1, {"FLK_CHECKPOINT": str(tmp_path / "all"), name: "few"}, failing=True)
    assert f"SetupError: {name}=few: expected an integer" in result.output
    assert not (tmp_path / "all").exists()
