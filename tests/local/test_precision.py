"""Precision: parameters, gradients and outputs have the dtypes that a script asks for, also of single modules."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SHARDING, SMALL_MODEL, told


def test_every_dtype_of_a_precision_is_used(ranks: Ranks) -> None:
    """Parameters and outputs have the dtype asked for; gradients are reduced in theirs."""
    script = (
        SMALL_MODEL
        + """
class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.tensor([0.1, 0.2, 0.3, 0.4]))
        self.register_buffer("count", torch.tensor([7]))

    def forward(self, x):
        tell("forward", [str(t.dtype) for t in (x, self.linear.weight, self.factor, self.count)])
        y = self.linear(x) * self.factor
        return {"out": y, "pair": (y.sum(), self.count), "list": [y], "none": None}

half, low, full = torch.float16, torch.bfloat16, torch.float32
with group():
    with init("full_shard") as run:
        torch.manual_seed(0)
        model = Probe()
        precision = flk.Precision(param=half, reduce=low, output=torch.float64)
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision)
        out = model(torch.ones(2, 4))
        tell("output", [str(t.dtype) for t in (out["out"], *out["pair"], *out["list"])] + [out["none"]])
        out["out"].sum().backward()
        tell("master", sorted({str(p.dtype) for g in optimizer.param_groups for p in g["params"]}))
        gradient = next(p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None and p.grad.numel())
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        tell("low", bool((gradient.to(low).float() == gradient.float()).all()))
    for reduce in (low, full):
        with init("full_shard") as run:
            pair = run.parallelize(*build(), precision=flk.Precision(reduce=reduce))
            tell(f"reduce {reduce}", train(run, *pair, steps=3))
"""
    )
    found = told(ranks(script, 2)[0])
    assert found["forward"] == ["torch.float16", "torch.float16", "torch.float32", "torch.int64"]
    assert found["output"] == ["torch.float64", "torch.float64", "torch.int64", "torch.float64", None]
    assert found["master"] == ["torch.float32"]
    assert found["low"]
    assert found["reduce torch.bfloat16"] != found["reduce torch.float32"]
    assert found["reduce torch.bfloat16"] == pytest.approx(found["reduce torch.float32"], abs=2e-2)


def test_what_a_block_computes_in_float32_stays_so(ranks: Ranks) -> None:
    """A router's loss in float32, next to bfloat16 outputs, comes out of its block with all of its digits."""
    script = (
        SMALL_MODEL
        + f"""
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        x = self.inner(self.linear(x))
        assert x.dtype == torch.bfloat16
        return x, x.new_ones((), dtype=torch.float32) + 0.001

class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x):
        x, first = self.blocks[0](x)
        x, second = self.blocks[1](x)
        assert first.dtype == second.dtype == torch.float32
        return x, first * second

with group():
    for name in {SHARDING}:
        with init(name) as run:
            model = run.parallelize(Router(), precision=flk.Precision())
            tell(name, model(torch.ones(2, 4))[1].item())
"""
    )
    for world_size in (1, 2):
        assert told(ranks(script, world_size)[0]) == dict.fromkeys(SHARDING, pytest.approx(1.001**2, abs=1e-6))


def test_modules_that_compute_in_float32_among_bfloat16(ranks: Ranks) -> None:
    """Batch norms, as in one process that casts around them."""
    script = (
        SMALL_MODEL
        + f"""
class Part(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.batch = nn.Linear(width, 7), nn.BatchNorm1d(7)
        self.plain, self.down = nn.BatchNorm1d(7, affine=False), nn.Linear(7, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.plain(self.batch(self.up(x)))))

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.head = nn.ModuleList(Part(5) for _ in range(2)), nn.Linear(5, 3)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x)

def as_fsdp_does(model):
    # One process: bfloat16 copies of all parameters but those of batch norms, around which is cast.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.register_forward_pre_hook(lambda module, args: tuple(each.float() for each in args))
            module.register_forward_hook(lambda module, args, output: output.bfloat16())
    def call(x):
        low = {{
            name: each if "batch." in name else each.bfloat16()
            for name, each in model.named_parameters()
        }}
        return torch.func.functional_call(model, low, (x.bfloat16(),)).float()
    return call

def learn(call, model, optimizer):
    seen = []
    for x in torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(2)):  # the same on all ranks
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    state = model.state_dict()
    assert all(value.dtype != torch.bfloat16 for value in state.values())
    return [*seen, *state["parts.1.batch.running_mean"].tolist(), *state["parts.0.plain.running_var"].tolist()]

def normed():
    torch.manual_seed(4)
    model = Normed()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def apart():
    with init("none", checkpoint=os.path.dirname(__file__) + "/apart", save_every=0) as run:
        model, optimizer = run.parallelize(*build(), precision=flk.Precision())
        train(run, model, optimizer, steps=1)
        run.save()

if "RANK" not in os.environ:
    model, optimizer = normed()
    tell("alone", learn(as_fsdp_does(model), model, optimizer))
with group():
    for name in {SHARDING}:
        with init(name) as run:
            model, optimizer = run.parallelize(*normed(), precision=flk.Precision())
            tell(name, learn(model, model, optimizer))
    if "RANK" in os.environ:
        refused("'embedding.weight' of model has other values on other ranks", apart)
"""
    )
    one, two = told(ranks(script, 1)[0]), told(ranks(script, 2)[0])
    alone = one.pop("alone")
    assert len(one) == len(two) == 5
    for name in one:
        assert one[name] == pytest.approx(alone, abs=2e-5), name
        assert two[name] == pytest.approx(alone, abs=2e-5), name
