"""Strategies: the losses of each are those of training in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.small_model import SHARDING, THREE_BLOCKS, told

# What one process does with bfloat16 copies of the parameters and float32 sums of gradients.
EMULATION = """
def emulate(accumulation):
    model, optimizer = build()
    seen = []
    for parts in data(6, accumulation)[:STEPS]:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        total = 0.0
        for rank in range(4):
            low = {name: p.detach().bfloat16().requires_grad_() for name, p in model.named_parameters()}
            own = [torch.zeros_like(p) for p in sums]
            for part in parts:
                everything = {**low, "scale": model.scale.bfloat16()}
                logits = torch.func.functional_call(model, everything, (part[rank][:, :-1],)).float()
                loss = F.cross_entropy(logits.flatten(0, 1), part[rank][:, 1:].flatten()) / accumulation
                for one, gradient in zip(own, torch.autograd.grad(loss, list(low.values()))):
                    one += gradient.float()
                total += loss.item() / 4
            for one, gradient in zip(sums, own):
                one += gradient / 4
        for parameter, gradient in zip(model.parameters(), sums):
            parameter.grad = gradient
        optimizer.step()
        seen.append(total)
    return seen
"""


LOW = ("no_shard", "full_shard", "hybrid_shard_zero2")  # in bfloat16 on four ranks


def wrong(found: dict[str, list[float]], expected: dict[str, list[float]], tolerance: float) -> dict[str, object]:
    """The entries of ``found`` that are not within ``tolerance`` of those in ``expected``."""
    return {
        key: (seen, expected[key]) for key, seen in found.items() if seen != pytest.approx(expected[key], abs=tolerance)
    }


@pytest.mark.promise("Training: Every strategy trains as one process does")
def test_every_strategy_trains_as_one_process_does(ranks: Ranks) -> None:
    """With accumulated gradients. Other tests make steps of one micro-batch, also of all strategies in bfloat16."""
    one = (
        THREE_BLOCKS
        + EMULATION
        + """
with init("ddp") as run:
    tell("fp32", train(run, *build(), steps=STEPS, accumulation=ACCUMULATION))
    tell("bf16", emulate(ACCUMULATION))
"""
    )
    four = (
        THREE_BLOCKS
        + f"""
with group():
    for name in {SHARDING}:
        with init(name) as run:
            for kind, precision in (("fp32", None), ("bf16", flk.Precision())):
                if kind == "bf16" and name not in {LOW}:
                    continue
                pair = run.parallelize(*build(), precision=precision, **hybrid(name))
                tell(f"{{kind}} {{name}}", train(run, *pair, steps=STEPS, accumulation=ACCUMULATION))
"""
    )
    sizes = "STEPS, ACCUMULATION = 2, 2\n"
    expected = told(ranks(sizes + one, 1)[0])
    ended = ranks(sizes + four, 4)
    found = told(ended[0])
    assert all(told(rank) == found for rank in ended)
    low = {key: found.pop(key) for key in list(found) if key.startswith("bf16")}
    assert (len(found), len(low)) == (5, len(LOW))
    assert wrong(found, dict.fromkeys(found, expected["fp32"]), 1e-6) == {}
    assert wrong(low, dict.fromkeys(low, expected["fp32"]), 2e-3) == {}
    # what is left is the order of sums in float32
    assert wrong(low, dict.fromkeys(low, expected["fp32"]), 1e-5).keys() == low.keys()
    assert wrong(low, dict.fromkeys(low, expected["bf16"]), 2e-5) == {}


def test_a_world_of_one_and_the_parameters_of_rank_0(ranks: Ranks) -> None:
    script = (
        THREE_BLOCKS
        + f"""
with group():
    for name in {SHARDING}:
        with init(name) as run:
            for precision in (None, flk.Precision()):
                # hybrid: one replica, one node
                pair = run.parallelize(*build(seed=3 + run.rank), precision=precision)
                tell(f"{{name}} {{precision is not None}}", train(run, *pair, steps=2))
    with init("hybrid_shard") as run:
        pair = run.parallelize(*build(seed=3 + run.rank), shard_size=1)
        tell("hybrid_shard of one", train(run, *pair, steps=2))
"""
    )
    one, two = told(ranks(script, 1)[0]), told(ranks(script, 2)[0])
    assert len(one) == 11
    expected = dict.fromkeys(one, one["no_shard False"])
    for losses in (one, two):
        low = {key: seen for key, seen in losses.items() if key.endswith("True")}
        assert wrong(low, expected, 2e-3) == {}
        assert wrong({key: seen for key, seen in losses.items() if key not in low}, expected, 1e-6) == {}


def test_by_default_a_hybrid_strategy_shards_within_a_node(ranks: Ranks) -> None:
    script = (
        THREE_BLOCKS
        + """
with group():
    for name in ("hybrid_shard", "hybrid_shard_zero2"):
        with init(name) as run:
            model, optimizer = run.parallelize(*build())
            weight, mesh = model.head.weight, model.head.weight.device_mesh
            seen = [list(mesh.shape), list(mesh.mesh_dim_names), mesh.mesh.tolist(), weight.to_local().shape[0]]
            tell(name, [seen, train(run, model, optimizer, steps=2)])
"""
    )
    nodes = {
        rank: {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)} for rank in range(4)
    }
    (alone,) = ranks(THREE_BLOCKS + 'with init("ddp") as run:\n    tell("losses", train(run, *build(), steps=2))\n', 1)
    losses = pytest.approx(told(alone)["losses"], abs=1e-6)
    for rank, ended in enumerate(ranks(script, 4, of_rank=nodes)):
        rows = (6, 5)[rank % 2]  # of 11
        expected = [[[2, 2], ["replicate", "shard"], [[0, 1], [2, 3]], rows], losses]
        assert told(ended) == {"hybrid_shard": expected, "hybrid_shard_zero2": expected}


# The tied parameters are clipped too: a norm that counts one twice is another.
VARIANTS = {
    "tied": ({"tied": True}, {"clip": 0.3}),
    "frozen": ({"freeze": ("embedding", "blocks.1", "blocks.2.up")}, {"clip": 0.3}),
}


@pytest.mark.promise("Training: Every strategy trains as one process does")
def test_clipping_and_tied_and_frozen_parameters(ranks: Ranks) -> None:
    script = (
        THREE_BLOCKS
        + f"""
with group():
    for name in {SHARDING[::2]} if "RANK" in os.environ else ("ddp",):
        for variant, (model, training) in {VARIANTS}.items():
            with init(name) as run:
                pair = run.parallelize(*build(**model), **(hybrid(name) if run.world_size > 1 else {{}}))
                tell(f"{{variant}} {{name}}", train(run, *pair, steps=2, **training))
"""
    )
    expected = {key.split()[0]: losses for key, losses in told(ranks(script, 1)[0]).items()}
    found = told(ranks(script, 4)[0])
    assert len(found) == 6
    assert wrong(found, {key: expected[key.split()[0]] for key in found}, 1e-6) == {}
    assert all(norm > 0.3 for losses in expected.values() for norm in losses[::2])  # so clipping had an effect


def test_ranks_that_use_different_parameters(ranks: Ranks) -> None:
    script = (
        THREE_BLOCKS
        + """
class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

    def forward(self, x, which):
        return self.parts[which](x)

with group():
    for name in ("ddp", "shard_grad_op", "full_shard"):
        torch.manual_seed(0)
        model = Choice()
        with init(name) as run:
            model = run.parallelize(model, find_unused_parameters=True, blocks=Choice)  # one block, gathered whole
            model(torch.ones(1, 3), run.rank).sum().backward()
            gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            tell(name, [g.tolist() for g in gradients if g is not None and g.abs().sum() > 0])
"""
    )
    found = told(ranks(script, 2)[0])
    assert len(found["ddp"]) == 4  # two of the three parts, each with half of what one rank gave
    for name in ("shard_grad_op", "full_shard"):
        for one, other in zip(found[name], found["ddp"], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def test_an_evaluation_between_the_backward_pass_and_the_step(ranks: Ranks, tmp_path: Path) -> None:
    """It leaves full parameters, which the step must not miss; and after the step, a save must not either."""
    script = (
        THREE_BLOCKS
        + f"""
with group():
    for name in ("shard_grad_op", "full_shard"):
        for evaluates in (False, True):
            with init(name, checkpoint=f"{tmp_path}/{{name}}-{{evaluates}}", save_every=0) as run:
                model, optimizer = run.parallelize(*build())
                words = data(6, 1)[0][0][run.rank]
                for _ in range(2):
                    optimizer.zero_grad()
                    loss_of(model, words).backward()
                    if evaluates:
                        with torch.no_grad():
                            model(words)
                    optimizer.step()
                    run.step()
                found = run.mean(loss_of(model, words).item())
                if evaluates:
                    with torch.no_grad():
                        model(words)
                    run.save(wait=True)
                tell(f"{{name}} {{evaluates}}", found)
"""
    )
    found = told(ranks(script, 2)[0])
    assert len(found) == 4
    for name, loss in found.items():
        assert loss == found[name.replace("True", "False")], name


def test_units_by_name_give_the_same_losses_to_the_bit(ranks: Ranks) -> None:
    script = (
        THREE_BLOCKS
        + """
calls = 0
plain = nn.Linear.forward

def counted(self, x):
    global calls
    calls += 1
    return plain(self, x)

def losses(name, **options):
    global calls
    calls = 0
    nn.Linear.forward = counted
    with init(name) as run:
        model, optimizer = run.parallelize(*build(), **hybrid(name), **options)
        sharded = [path for path, module in model.named_modules() if "FSDP" in type(module).__name__]
        return train(run, model, optimizer, steps=2), sharded, calls

named = ["embedding", "blocks.*", "head"]
with group():
    expected, sharded, count = losses("full_shard")
    assert count == 14  # 2 steps of 7 linear layers
    assert sharded == ["", *(f"blocks.{n}" for n in range(3))]
    found, sharded, _ = losses("full_shard", blocks=named)
    assert (found, sharded) == (expected, ["", "embedding", *(f"blocks.{n}" for n in range(3)), "head"])
    of_hybrid = losses("hybrid_shard")[0]
    found, sharded, count = losses("hybrid_shard", blocks="blocks.*", recompute=True)
    assert (found, sharded[1], count) == (of_hybrid, "blocks.0", 14 + 12)
"""
    )
    ranks(script, 2)


def test_an_embedding_and_a_head_as_large_as_a_block_are_sharded_apart(ranks: Ranks) -> None:
    script = (
        THREE_BLOCKS
        + """
def wide(tied=False, kind=Net):
    torch.manual_seed(3)
    model = kind(tied, words=200)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def losses(name, tied, kind=Net, **options):
    with init(name) as run:
        model, optimizer = run.parallelize(*wide(tied, kind), **options)
        sharded = [path for path, module in model.named_modules() if "FSDP" in type(module).__name__]
        # torch's AdamW would hide a gradient that has another scale.
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
        return train(run, model, optimizer, steps=4, accumulation=2), sharded

class Uncalled(Net):
    def forward(self, x):
        x = F.embedding(x, self.embedding.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

blocks = [f"blocks.{n}" for n in range(3)]
with group():
    for tied, kind in ((False, Net), (True, Net)):
        expected, _ = losses("ddp", tied, kind)
        found, sharded = losses("full_shard", tied, kind)
        assert sharded == (["", *blocks] if tied else ["", "embedding", *blocks, "head"]), sharded
        assert all(abs(one - other) < 1e-5 for one, other in zip(found, expected, strict=True)), (found, expected)
    low = {"precision": flk.Precision()}
    together, sharded = losses("full_shard", False, blocks="Block", **low)
    assert (together, sharded) == (losses("full_shard", False, **low)[0], ["", *blocks])
    with init("full_shard") as run:
        assert len([m for m in run.parallelize(build()[0]).modules() if "FSDP" in type(m).__name__]) == 4  # small ones
    with init("full_shard") as run:
        run.parallelize(wide(kind=Uncalled)[0], blocks="Block")(data(6, 1)[0][0][run.rank][:, :-1])
"""
    )
    ranks(script, 2)


def test_what_does_not_go_together_is_refused_before_anything_waits(ranks: Ranks) -> None:
    script = (
        THREE_BLOCKS
        + """
def parallelize(run, model=None, optimizer=None, **options):
    return run.parallelize(model or build()[0], optimizer, **options)

with group():
    for words, name, options in (
        ("shard_size=3 does not divide the world size, 2", "hybrid_shard", {"shard_size": 3}),
        ("blocks='Blok': the model has no module of this class or path; it has Block, ModuleList, Net, and the parts",
         "full_shard", {"blocks": "Blok"}),
        ("blocks has 'blocks', a ModuleList, which is not called: name its parts, as in 'blocks.*'", "full_shard",
         {"blocks": "blocks"}),
        ("recompute=True needs blocks", "ddp", {"model": nn.Linear(2, 2), "recompute": True}),
        ("is already wrapped in DistributedDataParallel", "full_shard",
         {"model": nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))}),
        ("group 0 of the optimizer holds a parameter of shape (3,)", "ddp",
         {"optimizer": torch.optim.SGD([torch.ones(3, requires_grad=True)])}),
    ):
        with init(name) as run:
            refused(words, lambda: parallelize(run, **options))
    for name in ("ddp", "full_shard"):
        with init(name) as run:
            refused("there are 0: call parallelize before", lambda: run.clip_grad_norm(1.0))
            model = build()[0]
            wrapped = parallelize(run, model)
            for each in (model, wrapped):
                refused("has already been parallelized", lambda: parallelize(run, each))
            parallelize(run)
            refused("there are 2: select one with model=", lambda: run.clip_grad_norm(1.0))
"""
    )
    ranks(script, 2)


ONE_SCRIPT = """
OPTIONS = {"precision": flk.Precision(), "find_unused_parameters": True, "shard_size": 2, "recompute": True}

def losses(run, steps, rank):
    # With the weights and the data of ``rank``.
    torch.manual_seed(rank)
    model = Net()
    model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters(), lr=0.01), **OPTIONS)
    found = []
    for words in data(6, 1)[run.steps : steps, 0, rank]:
        optimizer.zero_grad()
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        run.step()
        found.append(loss.item())
    return found

def alone(rank, steps):
    # The same in plain torch, with a copy in bfloat16 for each pass.
    torch.manual_seed(rank)
    model = Net()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for words in data(6, 1)[:steps, 0, rank]:
        optimizer.zero_grad()
        copy = Net().bfloat16()
        copy.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
        loss = F.cross_entropy(copy(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())
        loss.backward()
        for mine, its in zip(model.parameters(), copy.parameters()):
            mine.grad = its.grad.float()
        optimizer.step()
        found.append(loss.item())
    return found

with group():
    rank = dist.get_rank()
    for name in ("none", "ddp", *STRATEGIES):
        with init(name) as run:
            found = losses(run, 4, rank)
        if name == "none":
            assert found == pytest_approx(alone(rank, 4)), (found, alone(rank, 4))
    for steps in (2, 4):
        with init("none", checkpoint=FOLDER, save_every=1) as run:
            found = losses(run, steps, 0)
    assert len(found) == 2 and run.steps == 4  # resumed
    assert found == pytest_approx(alone(0, 4)[2:])
    tell("done", True)
"""


def test_one_script_runs_under_every_strategy(ranks: Ranks, tmp_path: Path) -> None:
    """So that `flk bench` can measure all of them, and ``none`` as what the others add communication to."""
    begin = f"STRATEGIES, FOLDER = {SHARDING!r}, {str(tmp_path / 'checkpoints')!r}\n"
    begin += "from pytest import approx\npytest_approx = lambda values: approx(values, rel=2e-3)\n"
    assert all(told(ended) == {"done": True} for ended in ranks(THREE_BLOCKS + begin + ONE_SCRIPT, 2))
