"""flk.save and flk.restore in scripts with a loop of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import told

SCRIPT = """
    import json, os, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk

    wrap = os.environ["WRAP"]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard
        fully_shard(model[0]); fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
    progress = {"epoch": 0, "note": "none"}
    things = dict(model=model, optimizer=optimizer, scheduler=scheduler, progress=progress)
    begun = flk.restore(**things)
    losses = []
    for step in range(begun, int(os.environ["STEPS"])):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        loss = (model(x) + torch.rand(())).square().mean()
        loss.backward()
        optimizer.step(); optimizer.zero_grad(); scheduler.step()
        progress.update(epoch=step + 1, note="some")
        losses.append(loss.item())
        flk.save(step + 1, wait=step + 1 == int(os.environ["STEPS"]), **things)
    print("=", json.dumps(["seen", [begun, losses, progress["epoch"], scheduler.get_last_lr()]]))
    if dist.is_initialized():
        dist.barrier()
"""


RUN_SAVES_TOO = """
    import os, torch
    import flk_runtime as flk

    with flk.init() as run:
        model = run.parallelize(torch.nn.Linear(2, 2))
        try:
            flk.save(1, model=model)
        except flk.SetupError as error:
            print(error)
        flk.save(1, checkpoint=os.environ["ELSEWHERE"], model=model, wait=True)
"""


def test_a_run_and_a_script_do_not_save_in_the_same_place(ranks: Ranks, tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    (result,) = ranks(RUN_SAVES_TOO, 1, {"FLK_CHECKPOINT": str(place), "ELSEWHERE": str(elsewhere)})
    expected = f"the run saves its own state in {place}: use run.register() and run.save(), or pass another checkpoint="
    assert expected in result.output
    assert (elsewhere / "latest").read_text().strip() == "step-000000001"


@pytest.mark.parametrize(("wrap", "world_size"), [("none", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_script_with_its_own_loop_resumes_bit_equal(ranks: Ranks, tmp_path: Path, wrap: str, world_size: int) -> None:
    def run(folder: str, steps: int) -> list[object]:
        variables = {"FLK_CHECKPOINT": str(tmp_path / folder), "STEPS": str(steps), "WRAP": wrap}
        seen: list[object] = told(ranks(SCRIPT, world_size, variables)[0])["seen"]
        return seen

    _, whole, _, rates = run("whole", 6)
    begun, first, _, _ = run("two", 3)
    resumed, second, epoch, rates_again = run("two", 6)
    assert (begun, resumed, epoch) == (0, 3, 6)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first + second == whole
    assert rates_again == rates
