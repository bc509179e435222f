"""Moving averages of the parameters: flk's under every strategy, and torch's AveragedModel where it works."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.ranks import Ranks
from tests.support.small_model import SHARDING, SMALL_MODEL, told

AVERAGES = (
    SMALL_MODEL
    + """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

warnings.filterwarnings("ignore", "The .grad attribute")  # of the compiler's own looking

def whole(model):
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in values]).tolist()

def go(name, steps, torchs=False, **options):
    # The parameters and their averages.
    with init(name, save_every=0, checkpoint=os.environ["BASE"] + "/" + os.environ.get("PLACE", name)) as run:
        shard_size = {"shard_size": 2} if name.startswith("hybrid") and run.world_size > 1 else {}
        model, optimizer = run.parallelize(*build(freeze=("blocks.1",)), **shard_size, **options)
        average = run.average(0.8)
        if torchs:
            other = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
            run.register("other", other)
        for (part,) in data(6, 1)[run.steps:steps]:
            optimizer.zero_grad()
            loss_of(model, share(run, part)).backward()
            optimizer.step()
            average.update()
            if torchs:
                other.update_parameters(model)
            run.step()
        before = whole(model)
        loss = loss_of(model, data(1, 1)[0][0][0]).item()
        with average.applied():
            found = whole(model)
            assert loss_of(model, data(1, 1)[0][0][0]).item() != loss
        assert whole(model) == before != found
        assert loss_of(model, data(1, 1)[0][0][0]).item() == loss
        if torchs:
            assert whole(other) == found
    return found
"""
)


def test_an_average_is_torchs_under_every_strategy_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    one = AVERAGES + 'tell("none", go("none", 4, torchs=True))\n'
    expected = told(ranks(one, 1, {"BASE": f"{tmp_path}/alone"})[0])["none"]
    several = (
        AVERAGES
        + """
with group():
    for name in os.environ["NAMES"].split():
        options = {"compile": "eager"} if name == "full_shard" else {}
        torch._dynamo.reset()
        tell(name, go(name, int(os.environ["STEPS"]), torchs=name in ("ddp", "no_shard"), **options))
"""
    )
    # Two levels of a hybrid strategy need four ranks.
    flat, hybrids = ("ddp", *SHARDING[:3]), SHARDING[3:]
    found = {}
    for world_size, names, steps in ((2, flat + hybrids, 2), (1, flat, 4), (4, hybrids, 4)):
        variables = {"BASE": str(tmp_path), "STEPS": str(steps), "NAMES": " ".join(names)}
        found |= told(ranks(several, world_size, variables)[0])
    assert found.keys() == {"ddp", *SHARDING}
    for name, values in found.items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), atol=1e-6, rtol=0, msg=name)


def test_what_an_average_cannot_do_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        AVERAGES
        + """
with group(), init("full_shard", checkpoint=os.environ["BASE"]) as run:
    refused("average works on one parallelized model, and there are 0", run.average)
    model, optimizer = run.parallelize(*build())
    refused("is sharded and cannot be copied: use run.average()", lambda: AveragedModel(model))
    refused("decay=2: expected a number from 0 to 1", lambda: run.average(2))
    average = run.average()
    with average.applied():
        refused("cannot save while an average is applied", run.save)
        refused("update of an average that is applied", average.update)
    average = run.average()
    model.head.requires_grad_(False)
    parallel, named = average._parallel, average._parallel.parameters
    looks = []
    parallel.parameters = lambda: looks.append(1) or named()
    average.update()
    assert len(looks) == 1, "an update looks at the modules once"
    parallel.parameters = named
    other = run.average()
    other.update()
    model.head.requires_grad_(True)
    average.update()
    refused("'head.weight' was frozen when the average was made", other.update)
"""
    )
    ranks(script, 2, {"BASE": str(tmp_path)})
