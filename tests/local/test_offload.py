"""Shards in the memory of the CPU: on a CPU they train as one process does, with all that goes with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

SCRIPT = (
    SMALL_MODEL
    + """
def go(name, first, last, folder, **options):
    with init(name, checkpoint=folder) as run:
        model, optimizer = build()
        model, optimizer = run.parallelize(model, optimizer, **hybrid(name), **options)
        average = run.average(0.5)
        seen = []
        for step in range(first, last):
            seen += train(run, model, optimizer, step + 1, accumulation=2, clip=0.3, first=step)
            average.update()
        with torch.no_grad(), average.applied():
            mean = run.mean(loss_of(model, share(run, data(6, 1)[0][0])).item())
        if options:
            local = {type(each.to_local()) for each in model.parameters()}
            groups = [unit._get_fsdp_state()._fsdp_param_group for unit in (model, *model.blocks)]
            assert all(type(each.offload_policy).__name__ == "CPUOffloadPolicy" for each in groups)
        return seen + [mean] if last == 6 else seen

name, first, last, folder = json.loads(os.environ["CELL"])
with group():
    if name == "none":
        tell(name, go(name, first, last, folder))
    for each in () if name == "none" else name.split():
        tell(each, go(each, first, last, f"{folder}/{each}", offload="cpu", init=None))
    if os.environ.get("REFUSALS"):
        for words, strategy, options in (
            ("offload='cpu': strategy ddp has no shards to move: use one that shards", "ddp", {"offload": "cpu"}),
            ("offload='cpu': strategy no_shard has no", "no_shard", {"offload": "cpu", "precision": flk.Precision()}),
            ("offload='disk': expected 'cpu'", "full_shard", {"offload": "disk"}),
        ):
            with init(strategy) as run:
                refused(words, lambda: run.parallelize(build()[0], **options))
"""
)


def test_an_offloaded_model_trains_as_one_process_and_resumes_at_another_size(ranks: Ranks, tmp_path: Path) -> None:
    def losses(size: int, names: str, first: int, last: int, **variables: str) -> dict[str, list[float]]:
        cell = json.dumps([names, first, last, str(tmp_path / names.split()[0])])
        return told(ranks(SCRIPT, size, {"CELL": cell, **variables})[0])

    expected = losses(1, "none", 0, 6)["none"]
    names = "full_shard hybrid_shard shard_grad_op"
    begun = losses(4, names, 0, 3)
    rest = losses(2, names, 3, 6, REFUSALS="yes")
    for name in names.split():
        assert begun[name] + rest[name] == pytest.approx(expected, abs=1e-5), name
