"""Every sharding strategy on both of torch's implementations, against training in one process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Ranks = Callable[..., list[Any]]

SHARDING = ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")
APIS = ("fsdp2", "fsdp1")

# A small language model, and a training that takes the same global batches at every world size. No dimension is a
# multiple of the number of ranks, so that shards are uneven.
MODEL = """
import contextlib, gc, json, os, shutil, warnings, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import flk_runtime as flk

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width + 1), nn.Linear(4 * width + 1, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, tied=False, words=11, width=6, blocks=3):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if tied:
            self.embedding.weight = self.head.weight

    def forward(self, x):
        x = self.embedding(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def build(tied=False, freeze=(), meta=False, seed=3):
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model = Net(tied)
    if meta:
        model.scale = torch.ones(1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(freeze)))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return model, torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=0.01)

def data(steps, accumulation):
    # (steps, accumulation, 4 parts, 2 sequences, 9 words)
    return torch.randint(0, 11, (steps, accumulation, 4, 2, 9), generator=torch.Generator().manual_seed(5))

def loss_of(model, words):
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

def share(run, parts):
    n = 4 // run.world_size
    return parts[run.rank * n : (run.rank + 1) * n].flatten(0, 1)

def train(run, model, optimizer, steps=5, accumulation=1, clip=None, first=0):
    seen = []
    for parts in data(6, accumulation)[first:steps]:
        optimizer.zero_grad()
        total = 0.0
        for number, part in enumerate(parts):
            with run.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                loss = loss_of(model, share(run, part)) / accumulation
                loss.backward()
            total += loss.item()
        if clip:
            norm = run.clip_grad_norm(clip, model=model)
            assert type(norm) is torch.Tensor and norm.shape == ()
            seen.append(norm.item())
        optimizer.step()
        run.step()
        seen.append(run.mean(total))
    return seen

@contextlib.contextmanager
def strategy(run, name):
    before, run.strategy = run.strategy, name
    try:
        yield
    finally:
        run.strategy = before

def hybrid(name):
    return {"shard_size": 2} if name.startswith("hybrid") else {}

def refused(words, action):
    try:
        action()
    except flk.SetupError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")

def tell(key, value):
    print("=", json.dumps([key, value]))
"""


def told(ended: Any) -> dict[str, Any]:
    """What a rank said with ``tell``."""
    return dict(json.loads(line[2:]) for line in ended.lines if line.startswith("= "))


# What one process does with bfloat16 copies of the parameters and float32 sums of gradients. FSDP1 adds up the
# gradients of an accumulation in the copies' dtype.
EMULATION = """
def emulate(accumulation, added_in):
    model, optimizer = build()
    seen = []
    for parts in data(6, accumulation)[:5]:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        total = 0.0
        for rank in range(4):
            low = {name: p.detach().bfloat16().requires_grad_() for name, p in model.named_parameters()}
            own = [torch.zeros_like(p, dtype=added_in) for p in sums]
            for part in parts:
                everything = {**low, "scale": model.scale.bfloat16()}
                logits = torch.func.functional_call(model, everything, (part[rank][:, :-1],)).float()
                loss = F.cross_entropy(logits.flatten(0, 1), part[rank][:, 1:].flatten()) / accumulation
                for one, gradient in zip(own, torch.autograd.grad(loss, list(low.values()))):
                    one += gradient.to(added_in)
                total += loss.item() / 4
            for one, gradient in zip(sums, own):
                one += gradient.float() / 4
        for parameter, gradient in zip(model.parameters(), sums):
            parameter.grad = gradient
        optimizer.step()
        seen.append(total)
    return seen
"""


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_every_strategy_trains_as_one_process_does(ranks: Ranks, kind: str) -> None:
    one = (
        MODEL
        + EMULATION
        + """
with flk.init(device="cpu", log_every=0) as run:
    for accumulation in (1, 4):
        tell(f"fp32 {accumulation}", train(run, *build(), accumulation=accumulation))
        tell(f"bf16 fsdp2 {accumulation}", emulate(accumulation, torch.float32))
        tell(f"bf16 fsdp1 {accumulation}", emulate(accumulation, torch.bfloat16))
"""
    )
    precision = "flk.Precision()" if kind == "bf16" else None
    four = (
        MODEL
        + f"""
with flk.init(device="cpu", log_every=0) as run:
    for name in {SHARDING}:
        for api in {APIS}:
            for accumulation in (1, 4):
                with strategy(run, name):
                    pair = run.parallelize(*build(), api=api, precision={precision}, **hybrid(name))
                tell(f"{{name}} {{api}} {{accumulation}}", train(run, *pair, accumulation=accumulation))
"""
    )
    expected = told(ranks(one, 1)[0])
    ended = ranks(four, 4)
    got = told(ended[0])
    assert all(told(rank) == got for rank in ended)
    assert len(got) == 20
    for key, losses in got.items():
        _, api, accumulation = key.split()
        assert losses == pytest.approx(expected[f"fp32 {accumulation}"], abs=1e-6 if kind == "fp32" else 2e-3), key
        if kind == "bf16":  # what is left is the order of sums in float32
            assert losses != pytest.approx(expected[f"fp32 {accumulation}"], abs=1e-5), key
            assert losses == pytest.approx(expected[f"bf16 {api} {accumulation}"], abs=2e-5), key


def test_a_world_of_one_and_the_numbers_of_rank_0(ranks: Ranks) -> None:
    script = (
        MODEL
        + f"""
with flk.init(device="cpu", log_every=0) as run:
    for name in {SHARDING}:
        for api in {APIS}:
            for precision in (None, flk.Precision()):
                with strategy(run, name):
                    options = dict(api=api, precision=precision)
                    pair = run.parallelize(*build(seed=3 + run.rank), **options)  # hybrid: one replica, one node
                tell(f"{{name}} {{api}} {{precision is not None}}", train(run, *pair, steps=2))
    with strategy(run, "hybrid_shard"):
        pair = run.parallelize(*build(seed=3 + run.rank), shard_size=1)
    tell("hybrid_shard of one", train(run, *pair, steps=2))
"""
    )
    alone, together = told(ranks(script, 1)[0]), told(ranks(script, 2)[0])
    assert len(alone) == 21
    for losses in (alone, together):
        for key, seen in losses.items():
            precise = not key.endswith("True")
            assert seen == pytest.approx(alone["no_shard fsdp2 False"], abs=1e-6 if precise else 2e-3), key


def test_clipping_and_tied_and_frozen_parameters(ranks: Ranks) -> None:
    variants = {
        "clip": ({}, {"clip": 0.3}),
        "tied": ({"tied": True}, {}),
        "frozen": ({"freeze": ("embedding", "blocks.1", "blocks.2.up")}, {"clip": 0.3}),
    }
    script = (
        MODEL
        + f"""
with flk.init(device="cpu", log_every=0) as run:
    for variant, (model, training) in {variants}.items():
        for name in {SHARDING} if run.world_size > 1 else ("ddp",):
            for api in {APIS} if run.world_size > 1 else ("fsdp2",):
                with strategy(run, name):
                    pair = run.parallelize(*build(**model), api=api, **hybrid(name))
                tell(f"{{variant}} {{name}} {{api}}", train(run, *pair, steps=3, **training))
"""
    )
    expected, got = told(ranks(script, 1)[0]), told(ranks(script, 4)[0])
    assert len(got) == 30
    for key, seen in got.items():
        assert seen == pytest.approx(expected[f"{key.split()[0]} ddp fsdp2"], abs=1e-6), key
    # A norm of 0.3 and more, so clipping was at work.
    assert all(norm > 0.3 for norm in expected["clip ddp fsdp2"][::2])


def test_meta_start_recomputation_and_compilation(ranks: Ranks) -> None:
    script = (
        MODEL
        + f"""
calls = 0
plain = Block.forward

def counted(self, x):
    global calls
    calls += not torch.compiler.is_compiling()
    return plain(self, x)

with flk.init(device="cpu", log_every=0) as run:
    names = list(build()[0].state_dict())
    for name in ("no_shard", "full_shard", "hybrid_shard_zero2") if run.world_size > 1 else ("ddp",):
        for api in {APIS} if run.world_size > 1 else ("fsdp2",):
            for variant in ("plain", "meta", "recompute", "compile", "both"):
                options = {{"recompute": variant in ("recompute", "both")}}
                if variant in ("compile", "both"):
                    options["compile"] = "eager"
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
                warnings.filterwarnings("ignore", "The .grad attribute")  # of the compiler's own looking
                Block.forward = plain if variant in ("compile", "both") else counted
                with strategy(run, name):
                    pair = run.parallelize(*build(meta=variant == "meta"), api=api, **hybrid(name), **options)
                calls = 0
                seen = train(run, *pair, steps=2)
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                assert list(run._models[-1].state_dict()) == names
                tell(f"{{variant}} {{name}} {{api}}", [seen, calls, graphs])
"""
    )
    expected = told(ranks(script, 1)[0])
    got = told(ranks(script, 4)[0])
    assert len(got) == 30
    for key, (seen, calls, graphs) in {**expected, **got}.items():
        variant = key.split()[0]
        assert seen == pytest.approx(expected["plain ddp fsdp2"][0], abs=1e-6), key
        assert calls == {"plain": 6, "meta": 6, "recompute": 12}.get(variant, 0), key
        assert (graphs > 0) == (variant in ("compile", "both")), key


def test_a_meta_start_never_holds_the_whole_model(ranks: Ranks) -> None:
    script = (
        MODEL
        + f"""
peak = number = 0
plain = nn.Linear.reset_parameters

def measured(self):
    global peak, number
    plain(self)
    number += 1
    if number % 8:  # looking at everything takes a while
        return
    local = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta]
    peak = max(peak, sum({{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}}.values()))

nn.Linear.reset_parameters = measured
with flk.init(device="cpu", log_every=0) as run:
    for api in {APIS}:
        with torch.device("meta"):
            model = Net(width=32, blocks=12)
        model.scale = torch.ones(1)
        whole = sum(p.numel() * 4 for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters())
        peak = number = 0
        with strategy(run, "full_shard"):
            model, optimizer = run.parallelize(model, optimizer, api=api)
        tell(api, peak / whole)
        run._models.clear(), run._checkpoints._objects.clear()
        del model, optimizer
        gc.collect()
"""
    )
    for rank in ranks(script, 4):
        # A quarter of the blocks before, and one or two blocks of twelve.
        assert all(0.2 < peak < 0.5 for peak in told(rank).values()), told(rank)


def test_checkpoints_go_from_any_strategy_and_world_size_to_any_other(ranks: Ranks, tmp_path: Path) -> None:
    cases = [
        ("ddp", "fsdp2"), ("full_shard", "fsdp2"), ("full_shard", "fsdp1"), ("shard_grad_op", "fsdp1"),
        ("hybrid_shard", "fsdp2"), ("hybrid_shard_zero2", "fsdp1"), ("no_shard", "fsdp1"),
    ]  # fmt: skip
    common = (
        MODEL
        + f"""
from torch.distributed import init_process_group
base = {str(tmp_path)!r}
init_process_group("gloo")

def go(folder, name, api, steps, precision=None):
    with flk.init(strategy=name, device="cpu", log_every=0, save_every=0, checkpoint=f"{{base}}/{{folder}}") as run:
        size = min(2, run.world_size)
        options = {{"shard_size": size}} if name.startswith("hybrid") else {{}}
        pair = run.parallelize(*build(), api=None if name == "ddp" else api, precision=precision, **options)
        return train(run, *pair, steps=steps, first=run.steps)
"""
    )
    four = (
        common
        + f"""
for name, api in {cases}:
    case = f"{{name}}-{{api}}"
    whole = go(case + "-undisturbed", name, api, 6)
    first = go(case, name, api, 3)
    if dist.get_rank() == 0:
        shutil.copytree(f"{{base}}/{{case}}", f"{{base}}/{{case}}-half")
    dist.barrier()
    tell(case, [whole, first + go(case, name, api, 6)])
for (name, api), (other, other_api) in zip({cases}, {cases[3:] + cases[:3]}):
    if dist.get_rank() == 0:
        shutil.rmtree(base + "/other", ignore_errors=True)
        shutil.copytree(f"{{base}}/{{name}}-{{api}}-half", base + "/other")
    dist.barrier()
    tell(f"{{name}} {{api}} to {{other}} {{other_api}}", go("other", other, other_api, 6))
go("low", "full_shard", "fsdp2", 3, flk.Precision())
dist.destroy_process_group()
"""
    )
    got = told(ranks(four, 4)[0])
    undisturbed = got["ddp-fsdp2"][0]
    own = ("embedding.weight", "scale", "blocks.0.up.weight", "head.weight")
    for name, api in cases:
        whole, resumed = got.pop(f"{name}-{api}")
        assert whole == resumed
        assert whole == pytest.approx(undisturbed, abs=1e-6)
        one, other = (
            torch.load(tmp_path / folder / "step-000000006.pt")["objects"]
            for folder in (f"{name}-{api}", f"{name}-{api}-undisturbed")
        )
        assert set(own) < one["model"].keys()
        assert one["model"].keys() == other["model"].keys()
        assert one["model"]["blocks.0.up.weight"].shape == (25, 6)
        assert all(torch.equal(value, other["model"][key]) for key, value in one["model"].items())
        assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
        for index, state in one["optimizer"]["state"].items():
            for key, value in state.items():
                expected = other["optimizer"]["state"][index][key]
                assert torch.equal(value, expected), (name, api, index, key, value, expected)
    assert len(got) == len(cases)
    for key, losses in got.items():
        assert losses == pytest.approx(undisturbed[3:], abs=1e-6), key
    low = torch.load(tmp_path / "low" / "step-000000003.pt")["objects"]
    assert {value.dtype for value in low["model"].values()} == {torch.float32}  # the master weights

    two = (
        common
        + """
for name, api in (("full_shard", "fsdp2"), ("hybrid_shard_zero2", "fsdp1"), ("shard_grad_op", "fsdp1")):
    tell(name, go(name + "-" + api + "-half", "full_shard", "fsdp1" if api == "fsdp2" else "fsdp2", 6))
dist.destroy_process_group()
"""
    )
    for name, losses in told(ranks(two, 2)[0]).items():
        assert losses == pytest.approx(undisturbed[3:], abs=1e-6), name


def test_uneven_batches_end_together(ranks: Ranks) -> None:
    script = (
        MODEL
        + """
with flk.init(device="cpu", log_every=0) as run:
    model, optimizer = run.parallelize(*build())
    mine = [5, 3, 4][run.rank]
    for batches in (list(range(mine)), iter(range(mine)), range(2)):
        steps = 0
        for number in run.join_batches(batches):
            assert number == steps
            loss_of(model, data(6, 1)[0][0][run.rank]).backward()
            optimizer.step()
            steps += 1
        tell(type(batches).__name__, steps)
"""
    )
    ended = ranks(script, 3)
    assert [told(rank) for rank in ended] == [{"list": 3, "range_iterator": 3, "range": 2}] * 3
    assert [line for line in ended[0].lines if line.startswith("flk:")] == [
        "flk: stopped after 3 steps, when rank 1 had no more batches; left: 2 on rank 0, 1 on rank 2",
        "flk: stopped after 3 steps, when rank 1 had no more batches; left: at least 1 on rank 0, at least 1 on rank 2",
    ]


def test_what_ranks_use_differently_and_an_evaluation_before_the_step(ranks: Ranks) -> None:
    script = (
        MODEL
        + """
class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

    def forward(self, x, which):
        return self.parts[which](x)

with flk.init(device="cpu", log_every=0) as run:
    for name in ("ddp", "shard_grad_op", "full_shard"):
        torch.manual_seed(0)
        model = Choice()
        with strategy(run, name):
            model = run.parallelize(model, find_unused_parameters=True, blocks=Choice)  # one unit, gathered whole
        model(torch.ones(1, 3), run.rank).sum().backward()
        gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        tell(name, [g.tolist() for g in gradients if g is not None and g.abs().sum() > 0])
    for evaluates in (False, True):
        with strategy(run, "shard_grad_op"):
            model, optimizer = run.parallelize(*build())
        words = data(6, 1)[0][0][run.rank]
        loss_of(model, words).backward()
        if evaluates:
            with torch.no_grad():
                model(words)
        optimizer.step()
        tell(f"evaluates {evaluates}", run.mean(loss_of(model, words).item()))
"""
    )
    got = told(ranks(script, 2)[0])
    assert len(got["ddp"]) == 4  # two of the three parts, each with half of what one rank gave
    for name in ("shard_grad_op", "full_shard"):
        assert [torch.tensor(each) for each in got[name]] != []
        for one, other in zip(got[name], got["ddp"], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
    assert got["evaluates True"] == got["evaluates False"]


def test_a_model_that_is_called_twice(ranks: Ranks) -> None:
    script = (
        MODEL
        + f"""
with flk.init(device="cpu", log_every=0) as run:
    for name in ("no_shard", "shard_grad_op", "full_shard"):
        for api in {APIS}:
            model, optimizer = build()
            del model.scale  # DDP sends buffers in place, which a second forward pass before the backward pass forbids
            model.scale = 1
            with strategy(run, name):
                model, optimizer = run.parallelize(model, optimizer, api=api)
            for step in range(2):
                optimizer.zero_grad()
                parts = data(6, 2)[step]
                loss = loss_of(model, share(run, parts[0])) + loss_of(model, share(run, parts[1]))
                loss.backward()
                optimizer.step()
            tell(f"{{name}} {{api}}", run.mean(loss.item()))
"""
    )
    alone, together = told(ranks(script, 1)[0]), told(ranks(script, 2)[0])
    for losses in (alone, together):
        for key, loss in losses.items():
            assert loss == pytest.approx(alone["no_shard fsdp2"], abs=1e-6), key


def test_an_optimizer_that_has_stepped_and_a_second_model(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        MODEL
        + f"""
with flk.init(device="cpu", log_every=0, checkpoint={str(tmp_path)!r}) as run:
    for name, api in (("ddp", None), ("full_shard", "fsdp2"), ("hybrid_shard", "fsdp1")):
        model, optimizer = build()
        for words in data(6, 1)[0][0]:
            optimizer.zero_grad()
            loss_of(model, words).backward()
            optimizer.step()
        with strategy(run, name):
            model, optimizer = run.parallelize(model, optimizer, api=api, **hybrid(name))
        tell(name, [train(run, model, optimizer, steps=3), [len(g["params"]) for g in optimizer.param_groups]])
"""
    )
    got = told(ranks(script, 4)[0])
    for name in ("full_shard", "hybrid_shard"):
        assert got[name][0] == pytest.approx(got["ddp"][0], abs=1e-6)
        assert got[name][1] == got["ddp"][1]
    objects = torch.load(tmp_path / "step-000000009.pt")["objects"]
    assert {"model", "model-1", "model-2", "optimizer", "optimizer-1", "optimizer-2"} <= objects.keys()


def test_what_does_not_go_together_is_refused_before_anything_waits(ranks: Ranks) -> None:
    script = (
        MODEL
        + """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device="meta"))

class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.ones(()))

def parallelize(name, model=None, optimizer=None, **options):
    with strategy(run, name):
        return run.parallelize(model or build()[0], optimizer, **options)

with flk.init(device="cpu", log_every=0) as run:
    for words, name, options in (
        ("shard_size=3 does not divide the world size, 2", "hybrid_shard", {"shard_size": 3}),
        ("shard_size=2 has no effect under strategy full_shard, only under hybrid_shard, ", "full_shard",
         {"shard_size": 2}),
        ("api='fsdp3': expected one of fsdp2, fsdp1", "full_shard", {"api": "fsdp3"}),
        ("precision='bf16': expected a flk_runtime.Precision", "full_shard", {"precision": "bf16"}),
        ("precision has no effect under strategy none", "none", {"precision": flk.Precision()}),
        ("does not work with api='fsdp1'", "full_shard", {"api": "fsdp1", "find_unused_parameters": True}),
        ("blocks='Blok': the model has no module of this class; it has Block, ModuleList, Net", "full_shard",
         {"blocks": "Blok"}),
        ("blocks=0: expected", "full_shard", {"blocks": 0}),
        ("recompute=True needs blocks", "ddp", {"model": nn.Linear(2, 2), "recompute": True}),
        ("'weight' of 0 (Odd) is on the meta device, and no reset_parameters() sets it", "full_shard",
         {"model": nn.Sequential(Odd())}),
        ("is already wrapped in DistributedDataParallel", "full_shard",
         {"model": nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))}),
        ("'scalar' is a scalar, which strategy full_shard cannot shard", "full_shard", {"model": Scalar()}),
        ("group 0 of the optimizer holds a parameter of shape (3,)", "ddp",
         {"optimizer": torch.optim.SGD([torch.ones(3, requires_grad=True)])}),
    ):
        refused(words, lambda: parallelize(name, **options))
    refused("Precision(param=8): expected a floating-point dtype", lambda: flk.Precision(param=8))
    refused("there are 0: call parallelize before", lambda: run.clip_grad_norm(1.0))
    for name in ("ddp", "full_shard"):
        model = build()[0]
        wrapped = parallelize(name, model)
        for each in (model, wrapped):
            refused("has already been parallelized", lambda: parallelize(name, each))
    refused("there are 2: select one with model=", lambda: run.clip_grad_norm(1.0))
"""
    )
    ranks(script, 2)


def test_bytes_per_rank_and_collectives_per_step(ranks: Ranks) -> None:
    script = (
        MODEL
        + f"""
from torch.utils._python_dispatch import TorchDispatchMode

class Collectives(TorchDispatchMode):
    # As torch's CommDebugMode counts, without its hooks on modules.
    def __init__(self):
        super().__init__()
        self.counts = {{}}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::").strip("_").removesuffix("_base")
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {{}}))

def held(tensors):
    # Bytes of memory behind the tensors of this rank, each counted once.
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum({{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}}.values())

def exact(tensors):
    return sum((t.to_local() if hasattr(t, "to_local") else t).numel() * t.element_size() for t in tensors)

with flk.init(device="cpu", log_every=0) as run:
    for name in {SHARDING}:
        for api in {APIS}:
            for kind, precision in (("fp32", None), ("bf16", flk.Precision())):
                with strategy(run, name):
                    model, optimizer = run.parallelize(*build(), api=api, precision=precision, **hybrid(name))
                train(run, model, optimizer, steps=1)
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                states = [optimizer.state[p] for p in parameters if p in optimizer.state]
                sizes = [
                    held(parameters), held([p.grad for p in parameters if p.grad is not None]),
                    exact([s["exp_avg"] for s in states]), exact([s["exp_avg_sq"] for s in states]),
                ]
                counts = []
                for accumulation in (1, 4):
                    optimizer.zero_grad()
                    with Collectives() as mode:
                        for number in range(accumulation):
                            with run.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                                loss_of(model, share(run, data(1, 1)[0][0])).backward()
                    counts.append(mode.counts)
                tell(f"{{name}} {{api}} {{kind}}", [sizes, counts])
"""
    )
    ended = [told(rank) for rank in ranks(script, 4)]
    assert len(ended[0]) == 20
    for key in ended[0]:
        name, api, kind = key.split()
        n = {"no": 1, "hy": 2}.get(name[:2], 4)
        replicated = api == "fsdp2" and n == 1 and kind == "fp32"  # in DDP
        totals = [0, 0]
        for rank, other in enumerate(ended):
            (parameters, gradients, first, second), (once, four_times) = other[key]
            if api == "fsdp2":
                # Whole rows, the last ones padded in memory. A rank may hold no row; its gradients have room for one.
                rows = [(math.ceil(shape[0] / n), shape, math.prod(shape[1:]) * 4) for shape in SHAPES]
                own = [max(0, min(count, shape[0] - rank % n * count)) for count, shape, _ in rows]
                assert parameters == sum(c * size for (c, _, size), here in zip(rows, own, strict=True) if here), key
                assert gradients == sum(count * size for count, _, size in rows), key
                assert first == second == sum(here * size for (_, _, size), here in zip(rows, own, strict=True)), key
            else:
                # Every parameter of a unit begins at a multiple of 16 bytes, of what is computed with; units are even.
                align = 4 if kind == "fp32" else 8
                sizes = [_flat(unit, align, n if n > 1 else 4) for unit in UNITS]
                assert parameters == gradients == sum(sizes) * 4 // n, key
                assert first == second <= parameters, key
            totals[0] += first
            totals[1] += second
            units = len(UNITS)
            expected = {"allreduce": 1 if replicated else units} if n == 1 else {"reduce_scatter": units}
            if replicated:
                expected["broadcast"] = 1  # of the buffer
            if name.startswith("hybrid"):
                expected["allreduce"] = units
            gathered = [0, 0] if n == 1 else [units, units]
            if name in ("full_shard", "hybrid_shard"):  # all but the last one again in each backward pass
                gathered = [2 * units - 1, 4 * (2 * units - 1)]
            for counts, number in zip((once, four_times), gathered, strict=True):
                assert counts == ({**expected, "allgather": number} if number else expected), key
        assert totals == [4 // n * WHOLE] * 2, key


# The shapes of the model's parameters by unit: three blocks, and what is outside of them.
BLOCK = [(6,), (6,), (25, 6), (25,), (6, 25), (6,)]
UNITS = [BLOCK, BLOCK, BLOCK, [(11, 6), (6,), (6,), (11, 6)]]
SHAPES = [shape for unit in UNITS for shape in unit]
WHOLE = sum(math.prod(shape) for shape in SHAPES) * 4


def _flat(unit: list[tuple[int, ...]], align: int, n: int) -> int:
    total = 0
    for shape in unit:
        total = math.ceil(total / align) * align + math.prod(shape)
    return math.ceil(total / n) * n
