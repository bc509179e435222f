"""Parameters that only some ranks use in a step, or none: they train as in one process under every strategy."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

# Four samples a step, each through a part of its own choice. Part 2 is used in one step, and in one micro-batch only.
CHOICE = (
    SMALL_MODEL
    + """
class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, which):
        return torch.stack([self.parts[number](each) for each, number in zip(x, which)])

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.choice, self.last = Choice(), nn.Linear(3, 1)

    def forward(self, x, which):
        return self.last(torch.tanh(self.choice(x, which)))

# By step, micro-batch and sample.
PARTS = [[[0, 1, 0, 1], [0, 0, 0, 2]], [[0, 0, 0, 0], [0, 0, 0, 0]], [[1, 0, 0, 0], [0, 0, 0, 0]], [[0] * 4] * 2]
MAKERS = {
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda each: torch.optim.AdamW(each, lr=0.01, weight_decay=0.3),
}

def train_choice(run, maker, to_none, **options):
    torch.manual_seed(1)
    model = Whole()
    optimizer = MAKERS[maker](model.parameters())
    model, optimizer = run.parallelize(model, optimizer, find_unused_parameters=True, blocks=Choice, **options)
    inputs = torch.randn(4, 2, 4, 3, generator=torch.Generator().manual_seed(2))
    size = 4 // run.world_size
    own = slice(run.rank * size, (run.rank + 1) * size)
    for step, parts in enumerate(PARTS):
        if step == 2:  # a pass whose gradient is thrown away is no use
            model(inputs[0][0][own], [3] * size).sum().backward()
        optimizer.zero_grad(set_to_none=to_none)
        for number, which in enumerate(parts):
            with run.no_sync() if number == 0 else contextlib.nullcontext():
                model(inputs[step][number][own], which[own]).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]

def all_of(run, **options):
    found = {}
    for maker in MAKERS:
        for to_none in (True, False):
            values = train_choice(run, maker, to_none, **options)
            found[f"{maker} {to_none}"] = torch.cat([each.detach().flatten() for each in values]).tolist()
    return found
"""
)


def test_unused_parameters_stay_where_they_are(ranks: Ranks) -> None:
    script = (
        CHOICE
        + """
with group():
    # Of four ranks, of which a hybrid strategy makes two levels, the others find nothing that two do not.
    for name in ("hybrid_shard",) if os.environ.get("WORLD_SIZE") == "4" else ("ddp", "shard_grad_op", "full_shard"):
        with init(name) as run:
            tell(name, all_of(run, **hybrid(name)))
    with init("none") as run:
        if run.world_size == 1:
            tell("none", all_of(run))
"""
    )
    alone = told(ranks(script, 1)[0])
    expected = {key: pytest.approx(values, abs=1e-6) for key, values in alone.pop("none").items()}
    plain = dict.fromkeys(("ddp", "shard_grad_op", "full_shard"), expected)
    assert alone == plain
    assert told(ranks(script, 2)[0]) == plain
    assert told(ranks(script, 4)[0]) == {"hybrid_shard": expected}


def test_under_none_with_precision_each_rank_trains_by_itself(ranks: Ranks) -> None:
    script = (
        CHOICE
        + """
with group():
    with init("none") as run:
        if run.rank == 0:
            model = run.parallelize(Whole(), find_unused_parameters=True, precision=flk.Precision(param=torch.float32))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
            run.register("optimizer", optimizer)
            before = model.choice.parts[3].weight.full_tensor().clone()
            model(torch.ones(1, 3), [0]).sum().backward()
            optimizer.step()
            tell("same", torch.equal(before, model.choice.parts[3].weight.full_tensor()))
"""
    )
    assert told(ranks(script, 2)[0])["same"]


# By step, micro-batch and half of the batch: the blocks that LayerDrop leaves out.
LAYER_DROP = (
    SMALL_MODEL
    + """
PLAN = [[[(0,), ()], [(1,), (2,)]], [[(0, 1, 2), (0, 1)]] * 2, [[(0,), (0,)]] * 2, [[(2,), ()], [(), (2,)]]]

class LayerDrop(Net):
    out = ()
    def forward(self, x):
        x = self.embedding(x) * self.scale
        for number, block in enumerate(self.blocks):
            x = x if number in self.out else block(x)
        return self.head(self.norm(x))

def drop(run, plan, **options):
    torch.manual_seed(3)
    inner = LayerDrop(blocks=3)
    model, optimizer = run.parallelize(inner, torch.optim.AdamW(inner.parameters(), weight_decay=0.9), **options)
    seen, halves = [], 2 // run.world_size
    for step, parts in zip(plan, data(len(plan), 2)):
        optimizer.zero_grad()
        for number, (out, part) in enumerate(zip(step, parts)):
            with run.no_sync() if number == 0 else contextlib.nullcontext():
                for half in range(run.rank * halves, (run.rank + 1) * halves):
                    inner.out = out[half]
                    loss = loss_of(model, part[2 * half : 2 * half + 2].flatten(0, 1)) / 2 / halves
                    loss.backward()
        optimizer.step()
        run.step()
        inner.out = ()
        with torch.no_grad():
            seen.append(run.mean(loss_of(model, share(run, parts[0])).item()))
    return seen
"""
)


RAW = """
class Raw(nn.Module):
    # The input of the first block needs no gradient.
    out = ()
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = x if number in self.out else x + block(x)
        return self.head(x)

def raw(run, precision=None):
    torch.manual_seed(3)
    inner = Raw()
    model, optimizer = run.parallelize(
        inner, torch.optim.SGD(inner.parameters(), lr=0.1), find_unused_parameters=True, precision=precision
    )
    seen, inputs = [], torch.linspace(-1, 1, 8 * 8).view(2, 4, 8)
    for plan in ([(0,), ()], [(0, 1), (2,)], [(), (0,)]):
        for half in [run.rank] if run.world_size == 2 else [0, 1]:
            inner.out = plan[half]
            loss = model(inputs[half]).float().square().mean() / (2 // run.world_size)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        inner.out = ()
        seen.append(run.mean(model(inputs[0]).float().square().mean().item()))
        run.step()
    return seen
"""


def test_the_first_block_is_left_out_whose_input_needs_no_gradient(ranks: Ranks) -> None:
    """FSDP2 ends the backward pass of such a block later than that of others."""
    one = SMALL_MODEL + RAW + "\nwith init('none') as run:\n    tell('losses', raw(run))\n"
    two = (
        SMALL_MODEL
        + RAW
        + """
with group():
    with init("full_shard") as run:
        tell("losses", raw(run))
        tell("in bfloat16", raw(run, flk.Precision()))
"""
    )
    expected = told(ranks(one, 1)[0])["losses"]
    found = told(ranks(two, 2)[0])
    assert found["losses"] == pytest.approx(expected, abs=1e-6)
    assert found["in bfloat16"] == pytest.approx(expected, rel=0.02)


def test_blocks_that_ranks_leave_out(ranks: Ranks) -> None:
    script = (
        LAYER_DROP
        + """
with group():
    if "RANK" not in os.environ:
        with init("none") as run:
            tell("none", drop(run, PLAN))
    else:
        for name in ("ddp", "full_shard"):
            with init(name) as run:
                tell(name, drop(run, PLAN, find_unused_parameters=True))
        with init("full_shard") as run:
            refused("block 'blocks.0' comes next on rank 1, and block 'blocks.1' on rank 0", lambda: drop(run, PLAN))
"""
    )
    expected = told(ranks(script, 1)[0])["none"]
    assert told(ranks(script, 2)[0]) == {name: pytest.approx(expected, abs=1e-6) for name in ("ddp", "full_shard")}


def test_without_the_option_each_pass_runs_the_blocks_of_the_first(ranks: Ranks) -> None:
    script = (
        LAYER_DROP
        + """
with group():
    for name, words in (
        ("ddp", "'blocks.2.norm.weight' has had no gradient in the latest backward pass on rank"),
        ("full_shard", "block 'blocks.2' is left out on rank"),
    ):
        with init(name) as run:
            refused(words, lambda: drop(run, [[[(), ()]] * 2, [[(2,), (2,)]] * 2]))
    with init("ddp") as run:
        model, optimizer = build()
        model, optimizer = run.parallelize(model, optimizer)
        train(run, model, optimizer, steps=1)
        model.module.embedding.requires_grad_(False)
        refused("'embedding.weight' was frozen", lambda: train(run, model, optimizer, steps=1))
"""
    )
    ranks(script, 2)
