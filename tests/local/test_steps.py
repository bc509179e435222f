"""Where a step ends, and what its checkpoint has of a loop as scripts write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.collection import often
from tests.support.ranks import Ranks

# Two loaders of five and seven steps; the script does the rest of a step and of an epoch after run.step, and ends
# without run.close.
TRAIN = """
    import os, torch, flk_runtime as flk
    from torch import nn
    from torch.utils.data import TensorDataset
    stop, every, top = (int(os.environ[name]) for name in ("STOP", "EVERY", "TOP"))
    run = flk.init(device="cpu", log_every=0, save_every=every)
    model = nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    module, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01))
    scheduler, seen = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), {"steps": 0, "epochs": 0}
    run.register("scheduler", scheduler)
    run.register("seen", seen)
    short, long = (
        run.loader(TensorDataset(torch.arange(float(count)).view(-1, 1) / 10), 1, name=name)
        for name, count in (("short", 10), ("long", 14))
    )
    next(iter(long))
    for epoch in short.epochs(3):
        for pair in zip(short, long):
            if run.steps == stop:
                if top:
                    run.save()
                run._saves.manager.wait()
                os._exit(0)
            (a,), (b,) = pair
            optimizer.zero_grad()
            loss = (module(a) - module(b)).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
            scheduler.step()
            seen["steps"] += 1
            print("step", run.steps, a.item(), b.item(), loss.item(), scheduler.get_last_lr(), seen)
        seen["epochs"] += 1
        print("epoch", epoch, seen, [each.tolist() for each in model.parameters()])
    print("end", run.steps, seen)
"""


@pytest.mark.parametrize(("stop", "every", "top"), often((0,), [(7, 1, 0), (5, 1, 0), (8, 0, 1)]))
def test_a_step_has_what_the_script_does_before_it_draws_the_next_batch(
    ranks: Ranks, tmp_path: Path, stop: int, every: int, top: int
) -> None:
    def train(folder: str, stop: int = -1) -> list[list[str]]:
        environment = {"FLK_CHECKPOINT": str(tmp_path / folder), "STOP": stop, "EVERY": every, "TOP": top}
        ended = ranks(TRAIN, 2, {name: str(value) for name, value in environment.items()})
        return [[line for line in rank.lines if not line.startswith("flk: ")] for rank in ended]

    undisturbed = train("one")
    begun, rest = train("two", stop), train("two")
    assert [len(lines) for lines in undisturbed] == [19, 19]
    assert [len(lines) for lines in begun] == [stop + stop // 5] * 2
    assert [first + second for first, second in zip(begun, rest, strict=True)] == undisturbed
    if every:  # the end of the process has saved the last step
        assert train("two") == [["end 15 {'steps': 15, 'epochs': 3}"]] * 2


# Epochs of one step, before, between and in which only rank 0 looks at batches: of the loader, and of one for
# evaluations whose iterator it keeps. All ranks compute a mean where rank 0 would save alone if a look ended the step.
LOOKS = """
    import torch, flk_runtime as flk
    from torch import nn
    from torch.utils.data import TensorDataset
    run = flk.init(device="cpu", log_every=0, save_every=1)
    model = nn.Linear(1, 1)
    module, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.arange(4.0).view(-1, 1))
    val = run.loader(data, 1, sampler=range(4), name="val")
    train = run.loader(data, 2, sampler=range(4), name="train")
    kept = iter(val)
    looks = run.is_main
    if looks:
        next(kept)
        next(iter(train))
    for epoch in range(4):
        if looks:
            next(iter(train))
        run.mean(epoch)
        for (batch,) in train:
            optimizer.zero_grad()
            loss = module(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
        if looks:
            next(iter(train))
            next(kept, None)
        run.mean(epoch)
    run.close()
    print("end", run.steps)
"""


def test_a_rank_that_looks_at_batches_alone_waits_for_no_other(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "place"
    ended = ranks(LOOKS, 2, {"FLK_CHECKPOINT": str(place), "FLK_KEEP": "9"})
    assert [rank.lines[-1] for rank in ended] == ["end 4"] * 2
    assert sorted(path.name for path in place.glob("step-*")) == [f"step-{step:09}" for step in (1, 2, 3, 4)]
