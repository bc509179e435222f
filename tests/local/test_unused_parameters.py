"""Parameters that only some ranks use in a step, or none: how they train with find_unused_parameters."""

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
    "plain": lambda each: torch.optim.SGD(each, lr=0.1),
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
        optimizer.zero_grad(set_to_none=to_none)
        for number, which in enumerate(parts):
            with run.no_sync() if number == 0 else contextlib.nullcontext():
                model(inputs[step][number][own], which[own]).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]

def all_of(run, makers, **options):
    found = {}
    for maker in makers:
        for to_none in (True, False):
            values = train_choice(run, maker, to_none, **options)
            found[f"{maker} {to_none}"] = torch.cat([each.detach().flatten() for each in values]).tolist()
    return found
"""
)


@pytest.mark.promise("Training: Every strategy trains as one process does")
def test_unused_parameters_stay_where_they_are(ranks: Ranks) -> None:
    """Where parameters are sharded, torch gives those that no rank has used a gradient of 0. Plain SGD ignores it."""
    script = (
        CHOICE
        + """
with group():
    for name in ("ddp", "full_shard") if "RANK" in os.environ else ("none",):
        with init(name) as run:
            tell(name, all_of(run, ["plain"] if name == "full_shard" else MAKERS))
"""
    )
    expected = told(ranks(script, 1)[0])["none"]
    found = told(ranks(script, 2)[0])
    assert found["ddp"].keys() == expected.keys()
    for name, trained in found.items():
        for key, values in trained.items():
            assert values == pytest.approx(expected[key], abs=1e-6), (name, key)


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


def test_blocks_that_ranks_leave_out(ranks: Ranks) -> None:
    script = (
        LAYER_DROP
        + """
with group():
    if "RANK" not in os.environ:
        with init("none") as run:
            tell("none", drop(run, PLAN))
    else:
        with init("ddp") as run:
            tell("ddp", drop(run, PLAN, find_unused_parameters=True))
"""
    )
    expected = told(ranks(script, 1)[0])["none"]
    assert told(ranks(script, 2)[0])["ddp"] == pytest.approx(expected, abs=1e-6)
