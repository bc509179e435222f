"""What scripts do by hand with gradients of sharded parameters between two passes: as in one process, or refused."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

SCRIPT = (
    SMALL_MODEL
    + """
def finish(run, optimizer, found):
    # The backward pass and the step that follow; the mean loss of all ranks.
    found.backward()
    optimizer.step()
    run.step()
    return run.mean(found.item())

def steps(run, between, in_no_sync=False, tied=False):
    # Each step drops or changes by hand what an earlier pass has left, and then makes the pass that counts.
    model = build(tied)[0]
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen = []
    for parts in data(4, 2):
        with run.no_sync() if in_no_sync else contextlib.nullcontext():
            loss_of(model, share(run, parts[0])).backward()
        if in_no_sync:
            between(model)
            found = loss_of(model, share(run, parts[1]))
        else:
            found = loss_of(model, share(run, parts[1]))  # full parameters are now in the place of shards
            between(model)
        seen.append(finish(run, optimizer, found))
    return seen

def drop(model):
    for each in model.parameters():
        each.grad = None

def drop_of_head(model):
    for each in model.head.parameters():
        del each.grad

def set_to_zero(model):
    for each in model.parameters():
        each.grad.detach_()
        each.grad.zero_()

def drop_by_parts(model):
    for each in model.children():
        each.zero_grad()

def halve(model):
    for each in model.parameters():
        each.grad.mul_(0.5)

def assign(model):
    for each in model.parameters():
        each.grad = each.grad * 0.5

def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

def read(model):
    norms = torch.stack([each.grad.norm().full_tensor() if hasattr(each.grad, "full_tensor") else each.grad.norm()
                         for each in model.parameters()])
    assert norms.min() > 0
    halve(model)

def thaw_after(run):
    model, _ = build()
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), find_unused_parameters=True)
    seen = []
    for number, (parts,) in enumerate(data(6, 1)):
        found = loss_of(model, share(run, parts))
        for each in (model.head, model.blocks[0]):
            each.requires_grad_(number % 3 != 1)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def of_units(run, between):
    # All parameters are in units inside of the root.
    torch.manual_seed(3)
    model = nn.Sequential(Block(6), Block(6))
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), blocks=[Block])
    x = torch.randn(4, 2, 4, 3, 6, generator=torch.Generator().manual_seed(5))
    seen = []
    for first, second in x:
        model(share(run, first)).square().mean().backward()
        found = model(share(run, second)).square().mean()
        between(model)
        seen.append(finish(run, optimizer, found))
    return seen

SYNCED = (drop, drop_of_head, set_to_zero, drop_by_parts, halve, assign, clip, read)
with group():
    for strategy in ("full_shard", "shard_grad_op") if "RANK" in os.environ else ("none",):
        for each in SYNCED:
            with init(strategy) as run:
                tell(f"{each.__name__} {strategy}", steps(run, each))
        with init(strategy) as run:
            tell(f"tied {strategy}", steps(run, drop, tied=True))
        for each in (drop, halve, clip):
            with init(strategy) as run:
                tell(f"units {each.__name__} {strategy}", of_units(run, each))
        for each in (drop, drop_of_head):
            with init(strategy) as run:
                tell(f"{each.__name__}_in_no_sync {strategy}", steps(run, each, in_no_sync=True))
        with init(strategy) as run:
            tell(f"thaw_after {strategy}", thaw_after(run))
        for each in (halve, assign, clip) if strategy == "full_shard" else ():
            with init(strategy) as run:
                refused("used after a backward pass in no_sync", lambda: steps(run, each, in_no_sync=True))
"""
)


def test_gradients_that_a_script_drops_or_changes_by_hand_are_those_of_one_process(ranks: Ranks) -> None:
    expected = told(ranks(SCRIPT, 1)[0])
    found = told(ranks(SCRIPT, 2)[0])
    assert len(found) == 30
    for key, losses in found.items():
        name = key.rpartition(" ")[0]
        assert losses == pytest.approx(expected[f"{name} none"], abs=1e-5), key


# Parameters that stand in the place of shards otherwise: over fewer ranks, and as DTensors of tensor parallelism.
STAND_INS = (
    SMALL_MODEL.replace("4 * width + 1", "4 * width")  # which two ranks can split
    + """
def halve_data(parameter):
    parameter.data.mul_(0.5)

@torch.no_grad()
def halve(parameter):
    parameter.mul_(0.5)

def changed(run, change, **options):
    # After a forward pass with gradients, which no backward pass follows.
    model, optimizer = run.parallelize(*build(), **options)
    loss_of(model, data(1, 1)[0][0][0])
    change(model.blocks[0].up.weight)
    optimizer.step()

def dropped(run, **options):
    model = build()[0]
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    seen = []
    for first, second in data(3, 2):
        loss_of(model, share(run, first)).backward()
        found = loss_of(model, share(run, second))
        for each in model.parameters():
            assert each.grad is not None
            each.grad = None
        found.backward()
        optimizer.step()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

SPLIT = {"tp": 2, "tp_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}
with group():
    if "RANK" in os.environ:
        for change in (halve, halve_data):
            for strategy, options in (("full_shard", {"reshard_after_forward": 2}), ("shard_grad_op", SPLIT)):
                with init(strategy) as run:
                    words = "changes the parameter 'up.weight' after a forward pass"
                    refused(words, lambda: changed(run, change, **options))
    with init("full_shard" if "RANK" in os.environ else "none") as run:
        tell("dropped", dropped(run, **({"reshard_after_forward": 2} if "RANK" in os.environ else {})))
"""
)


def test_parameters_that_stand_in_for_shards_over_fewer_ranks_or_split_ones(ranks: Ranks) -> None:
    expected = told(ranks(STAND_INS, 1)[0])["dropped"]
    assert told(ranks(STAND_INS, 4)[0])["dropped"] == pytest.approx(expected, abs=1e-5)
