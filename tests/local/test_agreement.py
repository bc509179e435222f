"""Ranks that a script makes train apart are refused, and buffers are those of rank 0 under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

SCRIPT = (
    SMALL_MODEL
    + """
def go(strategy, act, optimizer=torch.optim.SGD, count=3, **options):
    with init(strategy) as run:
        model = build()[0]
        model, found = run.parallelize(model, optimizer(model.parameters(), lr=0.1), **options)
        act = act(run, found)
        for step in range(count):
            def closure():
                found.zero_grad()
                loss = loss_of(model, share(run, data(6, 1)[step][0]))
                loss.backward()
                return loss  # of which the optimizer gets the mean
            loss = found.step(closure)
            act(model, loss.item())
            run.step()

def by_loss(mean, run, optimizer):
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
    return lambda model, loss: schedule.step(loss if mean else loss * (1 + 2 * run.rank))

def other_rates(run, optimizer):
    def act(model, loss):
        optimizer.param_groups[0]["lr"] = 0.1 + 0.01 * run.rank
    return act

@torch.no_grad()
def noise(run, optimizer):
    return lambda model, loss: [each.data.add_(torch.randn_like(each)) for each in model.parameters()]

def by_hand(run, optimizer):
    def act(model, loss):
        parameters = list(model.parameters())
        found = loss_of(model, share(run, data(6, 1)[0][0]))
        with torch.no_grad():
            for each, gradient in zip(parameters, torch.autograd.grad(found, parameters)):
                each -= gradient
    return act

def rounding(run, optimizer):  # as between devices of two types
    def act(model, loss):
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(1 + 2e-7 * run.rank)
    return act

with group():
    apart, rates = "has other values on other ranks", "lr in group 0 of SGD 0 is 0.1"
    for strategy, options in {"ddp": {}, "full_shard": {}, "hybrid_shard": {"shard_size": 1}}.items():
        go(strategy, functools.partial(by_loss, True), count=6, **options)
        refused(rates, lambda: go(strategy, other_rates, **options))
    refused(apart, lambda: go("ddp", noise))
    go("ddp", rounding)
    refused(apart, lambda: go("ddp", by_hand))
    tell("end", True)
"""
)


@pytest.mark.promise("Training: What would train wrongly without a word is right or refused by name")
def test_ranks_that_train_apart_are_refused(ranks: Ranks) -> None:
    assert told(ranks(SCRIPT, 2)[0]) == {"end": True}


STATISTICS = (
    SMALL_MODEL
    + """
class Centered(nn.Module):
    # Its training depends on a buffer that its forward pass changes, as that of a codebook does.
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2))
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("constant", torch.ones(6))
    def forward(self, x):
        with torch.no_grad():
            self.center.lerp_(x.mean(0), 0.5)
        x = x - self.center * self.constant
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def go(strategy, place, steps):
    with init(strategy, checkpoint=place) as run:
        torch.manual_seed(3)
        model = Centered()
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5))
        seen = []
        for step in range(run.steps, steps):
            for part in range(2):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + 10 * part + run.rank))
                with run.no_sync() if part == 0 else contextlib.nullcontext():
                    found = model(x + run.rank)
                    found.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            model.eval()
            with torch.no_grad():
                seen += [run.mean(found.item()), run.mean(model(x).item())]
            model.train()
        return seen

with group():
    for strategy in ("ddp", "full_shard"):
        tell(strategy, go(strategy, f"{FOLDER}/{strategy}-whole", 5))
        tell(f"{strategy} resumed", go(strategy, f"{FOLDER}/{strategy}", 2) + go(strategy, f"{FOLDER}/{strategy}", 5))
"""
)


def test_buffers_that_a_forward_pass_changes_are_those_of_rank_0_as_under_ddp(ranks: Ranks, tmp_path: Path) -> None:
    found = told(ranks(STATISTICS.replace("{FOLDER}", str(tmp_path)), 2)[0])
    assert len(found["ddp"]) == 10
    assert found == {name: pytest.approx(found["ddp"], abs=1e-5) for name in found}


def test_a_checkpoint_of_ranks_that_differ_under_none_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SMALL_MODEL
        + """
def go(place, averages):
    with init("none", checkpoint=place) as run:
        model, optimizer = build()  # the optimizer is not handed over
        model = run.parallelize(model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, share(run, data(6, 1)[step][0])).backward()
            if averages:
                for each in model.parameters():
                    dist.all_reduce(each.grad)
            optimizer.step()
            run.step()
        if not averages:
            run.save()

import flk_runtime.distributed
with group():
    go(f"{FOLDER}/equal", True)
    refused("has other values on other ranks, and a checkpoint has one of each", lambda: go(f"{FOLDER}/apart", False))
    assert os.path.exists(f"{FOLDER}/equal") and not os.path.exists(f"{FOLDER}/apart/latest")
    twos_or_ones = torch.full((2,), 2.0 - dist.get_rank(), dtype=torch.float64)  # bits of twos: the least integer
    assert flk_runtime.distributed.differing({"own": twos_or_ones}, None) == ["own"]
"""
    )
    ranks(script.replace("{FOLDER}", str(tmp_path)), 2)


# Optimizers that flk was not given, and what a given one trains beside the model.
OTHERS = (
    SMALL_MODEL
    + """
def by_hand(parameters):
    for each in parameters:
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()

def trained(run, make, average=by_hand, steps=2):
    # A head of the script's own behind the model; it returns how far the head is from that of other ranks.
    model, optimizer = run.parallelize(*build())
    torch.manual_seed(1)
    head = nn.Linear(11, 1, bias=False)
    own = make(run, head, optimizer)
    for step in range(steps):
        head(model(share(run, data(6, 1)[step][0])[:, :-1])).square().mean().backward()
        average(head.parameters())
        for each in {optimizer, own}:
            each.step(), each.zero_grad()
        run.step()
    return head.weight.detach()

def separate(run, head, optimizer):
    return torch.optim.SGD(head.parameters(), lr=0.1)

def in_a_closure(run, head, optimizer):
    own = torch.optim.LBFGS(head.parameters(), max_iter=1)
    step = own.step
    def closure():
        own.zero_grad()
        loss = head.weight.square().sum()
        loss.backward()
        return loss
    own.step = lambda: step(closure)
    return own

def averaged(run, head, optimizer):
    return flk.DistributedOptimizer(torch.optim.SGD(head.parameters(), lr=0.1))

def in_the_same(run, head, optimizer):
    optimizer.add_param_group({"params": head.parameters()})
    return optimizer

def without_one(run, head, optimizer):
    optimizer.param_groups[1]["params"].pop()
    return optimizer

def registered(run, head, optimizer):
    own = separate(run, head, optimizer)
    run.register("own", flk.per_rank(own))
    return own

def not_averaged(parameters):
    pass

def without_parallelize(run):
    model, optimizer = build()
    for step in range(2):
        loss_of(model, share(run, data(6, 1)[step][0])).backward()
        by_hand(model.parameters())
        optimizer.step(), optimizer.zero_grad(), run.step()

def is_alike(weight):
    other = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(other, weight)
    return torch.equal(*other)
"""
)


def test_what_was_not_handed_over_trains_as_in_torch(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        OTHERS
        + f"""
with group():
    for strategy in ("ddp", "full_shard"):
        with init(strategy, checkpoint={str(tmp_path)!r} + "/" + strategy) as run:
            assert is_alike(trained(run, separate))
        for make, average, alike in (
            (in_a_closure, not_averaged, True),
            (averaged, not_averaged, True),
            (separate, not_averaged, False),  # a model of each rank
            (registered, not_averaged, False),
            (in_the_same, by_hand, True),
        ):
            with init(strategy) as run:
                assert is_alike(trained(run, make, average)) is alike, make
        with init(strategy) as run:
            without_parallelize(run)
        with init(strategy) as run:
            words = "parameter 16 of AdamW 0, of shape (1, 11), in no model of parallelize, has other values"
            refused(words, lambda: trained(run, in_the_same, not_averaged))
        with init(strategy, checkpoint={str(tmp_path)!r} + "/" + strategy + "-grown") as run:
            refused("the groups of AdamW were changed after parallelize", lambda: trained(run, in_the_same))
        with init(strategy, checkpoint={str(tmp_path)!r} + "/" + strategy + "-smaller") as run:
            refused("the groups of AdamW were changed after parallelize", lambda: trained(run, without_one))
"""
    )
    ranks(script, 2)
