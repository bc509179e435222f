"""Scripts for `flk run --verify`: some train as one process does, some do not, and then with the cause to be named."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent
from typing import Final

_BEGIN: Final = """
import contextlib, os, random, torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
import flk_runtime as flk
torch.manual_seed(0)

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

X, Y = torch.randn(98, 8), torch.randint(0, 4, (98,))

class Block(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.dropout = nn.Dropout(dropout)
    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))

class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(2))
    def forward(self, x):
        x = self.stem(x)
        for each in self.layers:
            x = each(x)
        return self.head(x)
"""
_RUN: Final = """
run = flk.init()
"""
_LOOP: Final = """
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    run.backward(loss)
"""


@dataclass(frozen=True)
class Case:
    """A script, and the beginnings of the causes of which one has to be named; none: it trains as one process."""

    script: str
    causes: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ("ddp", "full_shard")


def run_script(
    model: str = "Net()",
    *,
    define: str = "",
    optimizer: str = "torch.optim.AdamW(model.parameters(), lr=1e-2)",
    options: str = "",
    after: str = "",
    loader: str = "run.loader(TensorDataset(X, Y), batch_size=4)",
    loop: str = _LOOP,
    before_step: str = "",
    step: str = "optimizer.step()",
    after_step: str = "",
) -> str:
    """A script with `flk.init` and `run.parallelize`, of which parts are replaced."""
    parts = [
        _BEGIN,
        dedent(define),
        _RUN,
        f"model = {model}",
        f"optimizer = {optimizer}",
        f"model, optimizer = run.parallelize(model, optimizer{', ' if options else ''}{options})",
        dedent(after),
        f"loader = {loader}",
        "for x, y in loader.steps(4):",
        indent(dedent(loop), "    "),
        *(indent(dedent(part), "    ") for part in (before_step, step, after_step, "run.step(loss=loss.detach())")),
        "run.close()",
    ]
    return "\n".join(parts)


def own_loop(body: str) -> str:
    """A script with `flk.adopt`."""
    return _BEGIN + dedent(body)


_ATTENTION: Final = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        for each in self.layers:
            x = each(x)
        return self.head(x)
TOKENS = torch.randint(0, 32, (96, 7))
"""
_TOKENS: Final = "run.loader(TensorDataset(TOKENS, TOKENS.roll(-1, 1)), batch_size=4)"
_PADDED: Final = """
X = torch.randint(0, 32, (96, 7))
Y = torch.where(torch.rand(96, 7) < torch.rand(96, 1), X, -100)
"""
_ACCUMULATE: Final = """
for batch in run.loader(TensorDataset(X, Y), batch_size=4, accumulate=2).steps(4):
    optimizer.zero_grad()
    for x, y in run.micro_batches(batch):
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
    optimizer.step()
    run.step(loss=loss.detach())
raise SystemExit
"""
_TWICE: Final = """
for step, (x, y) in enumerate(loader):
    with run.no_sync() if step % 2 == 0 else contextlib.nullcontext():
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
    if step % 2:
        optimizer.step()
        run.step(loss=loss.detach())
        optimizer.zero_grad()
raise SystemExit
"""
_GAN: Final = """
run = flk.init()
G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
D = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 1))
g, d = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
G, g = run.parallelize(G, g)
D, d = run.parallelize(D, d)
for x, y in run.loader(TensorDataset(X, Y), batch_size=4).steps(4):
    fake = G(torch.randn(len(x), 4))
    both = D(torch.cat([x, fake.detach()]))
    loss = F.softplus(-both[: len(x)]).mean() + F.softplus(both[len(x) :]).mean()
    d.zero_grad(); loss.backward(); d.step()
    loss = F.softplus(-D(fake)).mean()
    g.zero_grad(); d.zero_grad(); loss.backward(); g.step()
    run.step(loss=loss.detach())
run.close()
"""
_VAE: Final = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)
    def forward(self, x):
        mean, log = self.encode(x).chunk(2, -1)
        z = mean + (log / 2).exp() * torch.randn_like(mean)
        return ((self.decode(z) - x) ** 2).mean() - 0.1 * (1 + log - mean**2 - log.exp()).mean()
"""
_OWN_DDP: Final = """
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(Net(dropout=0.2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loop = flk.adopt(model=model, optimizer=optimizer)
sampler = DistributedSampler(TensorDataset(X[:96], Y[:96]), seed=1)
loader = DataLoader(sampler.dataset, batch_size=BATCH, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(MODEL(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        loop.step(loss=loss.detach())
loop.close()
"""
_DIVIDED: Final = "12 // dist.get_world_size()"


def _own_ddp(call: str, batch: str = _DIVIDED) -> str:
    return _OWN_DDP.replace("MODEL", call).replace("BATCH", batch)


_OWN_SHARDS: Final = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = Net()
for each in model.layers:
    fully_shard(each)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loop = flk.adopt(model=model, optimizer=optimizer)
for x, y in loop.loader(TensorDataset(X, Y), batch_size=4).steps(4):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    loop.step(loss=loss.detach())
loop.close()
"""
_BY_HAND: Final = """
run = flk.init(strategy="none")
model, optimizer = run.parallelize(Net(), None), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in run.loader(TensorDataset(X, Y), batch_size=4).steps(4):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward()
    for each in model.parameters():
        REDUCE
    optimizer.step()
    run.step(loss=loss.detach())
run.close()
"""
_SLICED: Final = """
run = flk.init()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.parallelize(model, optimizer)
for step in range(4):
    x, y = (each[step * 24 :][:24].chunk(run.world_size)[run.rank] for each in (X, Y))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    run.step(loss=loss.detach())
run.close()
"""
_STREAM: Final = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y))
"""
_AUGMENTED: Final = """
class Data(Dataset):
    def __len__(self): return 96
    def __getitem__(self, index):
        x = X[index]
        return (x.flip(0) if torch.rand(1) < 0.5 else x) + 0.1 * torch.randn(8), Y[index]
"""

RIGHT: Final[dict[str, Case]] = {
    "Muon, which computes in bfloat16": Case(
        run_script(optimizer="torch.optim.Muon([each for each in model.parameters() if each.ndim > 1], lr=1e-2)"),
        strategies=("full_shard",),
    ),
    "plain": Case(
        run_script(), strategies=("ddp", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
    ),
    "dropout": Case(run_script("Net(dropout=0.3)"), strategies=("ddp", "full_shard", "hybrid_shard")),
    "attention, tied weights": Case(
        run_script(
            "Model()",
            define=_ATTENTION,
            loader=_TOKENS,
            loop=_LOOP.replace("model(x), y", "model(x).flatten(0, 1), y.flatten()"),
        ),
        strategies=("ddp", "full_shard", "shard_grad_op"),
    ),
    "micro-batches": Case(run_script(after=_ACCUMULATE)),
    "accumulation by hand": Case(
        run_script(after="loader = run.loader(TensorDataset(X[:96], Y[:96]), batch_size=4)" + _TWICE),
        strategies=("ddp",),
    ),
    "clipping": Case(
        run_script(before_step="run.clip_grad_norm(0.1)"), strategies=("ddp", "full_shard", "hybrid_shard")
    ),
    "torch's clipping": Case(run_script(before_step="nn.utils.clip_grad_norm_(model.parameters(), 0.1)")),
    "two optimizers": Case(
        run_script(
            optimizer="[torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9), "
            "torch.optim.Adam([*model.stem.parameters(), *model.head.parameters()], lr=1e-2)]",
            loop=_LOOP.replace("optimizer.zero_grad()", "[each.zero_grad() for each in optimizer]"),
            step="[each.step() for each in optimizer]",
        )
    ),
    "scaler and autocast": Case(
        run_script(
            after="scaler = torch.amp.GradScaler('cpu')",
            loop="""
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            run.backward(scaler.scale(loss))
            """,
            before_step="scaler.unscale_(optimizer); run.clip_grad_norm(1.0)",
            step="scaler.step(optimizer); scaler.update()",
        )
    ),
    "reduced precision": Case(
        run_script(options="precision=flk.Precision()"), strategies=("full_shard", "hybrid_shard", "ddp")
    ),
    "bfloat16 parameters": Case(run_script("Net().bfloat16()", loop=_LOOP.replace("model(x)", "model(x.bfloat16())"))),
    "float64": Case(run_script("Net().double()", loop=_LOOP.replace("model(x)", "model(x.double())"))),
    "recomputation": Case(run_script("Net(dropout=0.2)", options="recompute=True")),
    "Muon": Case(
        run_script(
            optimizer="[torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2), "
            "torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-2)]",
            loop=_LOOP.replace("optimizer.zero_grad()", "[each.zero_grad() for each in optimizer]"),
            step="[each.step() for each in optimizer]",
        ),
        strategies=("ddp",),
    ),
    "a frozen part and a schedule": Case(
        run_script(
            after="model.stem.requires_grad_(False)\nsched = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)",
            after_step="sched.step()",
        ),
        strategies=("full_shard",),
    ),
    "a mean over tokens with its weight": Case(
        run_script(
            "Model()",
            define=_ATTENTION + _PADDED,
            loop="""
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            run.backward(loss, weight=(y != -100).sum())
            """,
        )
    ),
    "an unused parameter": Case(
        run_script(
            "Model()",
            define="""
            class Model(Net):
                def __init__(self):
                    super().__init__()
                    for each in self.layers:
                        each.extra = nn.Parameter(torch.ones(16))
            """,
        ),
        strategies=("full_shard",),
    ),
    "a compiled model": Case(run_script(after="model = torch.compile(model, fullgraph=True)")),
    "two networks": Case(own_loop(_GAN)),
    "noise in a pass": Case(
        run_script("Model()", define=_VAE, loop=_LOOP.replace("F.cross_entropy(model(x), y)", "model(x)"))
    ),
    "mixed samples": Case(
        run_script(
            loop="""
            other = torch.randperm(len(x))
            loss = F.cross_entropy(model(0.7 * x + 0.3 * x[other]), y)
            optimizer.zero_grad()
            run.backward(loss)
            """
        )
    ),
    "diffusion": Case(
        run_script(
            "nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))",
            loop="""
            t, noise = torch.randint(0, 100, (len(x), 1)) / 100, torch.randn_like(x)
            loss = F.mse_loss(model(torch.cat([x * (1 - t) + noise * t, t], 1)), noise)
            optimizer.zero_grad()
            run.backward(loss)
            """,
        )
    ),
    "augmented samples": Case(run_script(define=_AUGMENTED, loader="run.loader(Data(), batch_size=4)")),
    "a stream": Case(run_script(define=_STREAM, loader="run.loader(Stream(), batch_size=4)")),
    "batches of a sampler": Case(
        run_script(
            loader="run.loader(TensorDataset(X, Y), batch_sampler="
            "torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(X), 4, True))"
        )
    ),
    "an average of the parameters": Case(
        run_script(
            after_step="""
            with torch.no_grad():
                for each in model.parameters():
                    mean = optimizer.state[each].setdefault("average", each.detach().clone())
                    mean.lerp_(each, 0.01)
            """
        )
    ),
    "limits of parameters": Case(
        run_script(after_step="with torch.no_grad():\n    [each.clamp_(-0.3, 0.3) for each in model.parameters()]")
    ),
    "gradients that the script averages": Case(
        own_loop(_BY_HAND.replace("REDUCE", "dist.all_reduce(each.grad); each.grad /= run.world_size")),
        strategies=("none",),
    ),
    "batches that the script cuts": Case(own_loop(_SLICED)),
    "own DDP": Case(own_loop(_own_ddp("model")), strategies=("none",)),
    "own fully_shard": Case(own_loop(_OWN_SHARDS), strategies=("none",)),
    "evaluation of rank 0": Case(
        run_script(
            after_step="if run.rank == 0:\n    with torch.no_grad():\n        model.module.head(torch.zeros(1, 16))"
        ).replace("model.module.head", "getattr(model, 'module', model).head"),
        strategies=("ddp",),
    ),
    "a parametrized weight": Case(
        run_script(
            "nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4))"
        )
    ),
    "a penalty of gradients": Case(
        run_script(
            loop="""
            x.requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = F.cross_entropy(out, y) + slope.square().mean()
            optimizer.zero_grad()
            run.backward(loss)
            """
        ),
        strategies=("ddp",),
    ),
}

_NOT_REDUCED: Final = ("not reduced", "passes without reduction")
WRONG: Final[dict[str, Case]] = {
    "no_sync left on": Case(
        run_script(loop="with run.no_sync():" + indent(_LOOP.replace("run.backward(loss)", "loss.backward()"), "    ")),
        (*_NOT_REDUCED, "missing", "refused: "),
    ),
    "model.module": Case(run_script(loop=_LOOP.replace("model(x)", "model.module(x)")), _NOT_REDUCED, ("ddp",)),
    "a method of the wrapped model": Case(
        run_script(loop=_LOOP.replace("model(x)", "model.module.head(model.module.stem(x))")), _NOT_REDUCED, ("ddp",)
    ),
    "no call at all of the wrapper in a second pass": Case(
        run_script(
            loop=_LOOP.replace("run.backward(loss)", "run.backward(loss)\n    (model.module(x) ** 2).mean().backward()")
        ),
        _NOT_REDUCED,
        ("ddp",),
    ),
    "blocks that return objects": Case(
        run_script(
            "Model()",
            define="""
            class Out:
                def __init__(self, value): self.value = value
            class ObjectBlock(Block):
                def forward(self, x): return Out(super().forward(x))
            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
                    self.layers = nn.ModuleList(ObjectBlock() for _ in range(3))
                def forward(self, x):
                    x = self.stem(x)
                    for each in self.layers:
                        x = each(x).value
                    return self.head(x)
            """,
        ),
        ("missing", "not reduced", "refused: "),
        ("full_shard",),
    ),
    "a loss in an attribute": Case(
        run_script(
            "Model(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))",
            define="""
            class Model(nn.Sequential):
                def forward(self, x, y):
                    self.loss = F.cross_entropy(super().forward(x), y)
            """,
            loop="model(x, y)\nloss = model.loss\noptimizer.zero_grad()\nrun.backward(loss)",
        ),
        ("missing", "not reduced", "refused: "),
        ("full_shard",),
    ),
    ".data after parallelize": Case(
        run_script(after="model.head.weight.data = model.head.weight.data * 0.5"),
        ("other parameters", "missing", "refused: "),
        ("full_shard",),
    ),
    "a replaced parameter": Case(
        run_script(after="model.head.weight = nn.Parameter(torch.zeros(4, 16))"),
        ("missing", "other parameters", "not reduced", "refused: "),
        ("full_shard",),
    ),
    "shards drawn anew": Case(
        run_script(after="nn.init.normal_(model.head.weight)"), ("other parameters",), ("full_shard",)
    ),
    "gradients of autograd.grad": Case(
        run_script(
            loop="""
            loss = F.cross_entropy(model(x), y)
            for each, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                each.grad = grad
            """
        ),
        _NOT_REDUCED,
        ("ddp",),
    ),
    "BatchNorm": Case(
        run_script("nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))"), ("BatchNorm",)
    ),
    "clipping by the norm of shards": Case(
        run_script(
            before_step="""
            shards = [local(each.grad) for each in model.parameters()]
            norm = torch.stack([each.norm() for each in shards if each.numel()]).norm()
            for each in shards: each.mul_(0.1 / norm)
            """
        ),
        ("clipping by a local norm", "one factor"),
        ("full_shard",),
    ),
    "a sum as the loss": Case(
        run_script(
            optimizer="torch.optim.SGD(model.parameters(), lr=1e-3)",
            loop=_LOOP.replace("model(x), y)", "model(x), y, reduction='sum')"),
        ),
        ("sum in place of mean",),
    ),
    "a mean over other numbers of tokens": Case(
        run_script(
            "Model()",
            define=_ATTENTION + _PADDED,
            loop=_LOOP.replace("model(x), y", "model(x).flatten(0, 1), y.flatten()"),
        ),
        ("a loss over", "one factor"),
    ),
    "a learning rate times the ranks": Case(
        run_script(optimizer="torch.optim.SGD(model.parameters(), lr=0.05 * run.world_size)"), ("learning rate",)
    ),
    "a loss times the ranks": Case(
        run_script(loop=_LOOP.replace("backward(loss)", "backward(loss * run.world_size)")), ("multiplied",)
    ),
    "gradients added up again": Case(
        run_script(before_step="for each in model.parameters(): dist.all_reduce(each.grad)"), ("multiplied",), ("ddp",)
    ),
    "gradients of the script's own, not averaged": Case(
        own_loop(_BY_HAND.replace("REDUCE", "pass")), _NOT_REDUCED, ("none",)
    ),
    "a contrastive loss": Case(
        run_script(
            loop=_LOOP.replace(
                "F.cross_entropy(model(x), y)", "F.cross_entropy(model(x) @ model(x).T, torch.arange(len(x)))"
            ).replace("model(x) @ model(x).T", "(out := model(x)) @ out.T")
        ),
        ("a loss over",),
    ),
    "a hook that clips an activation's gradient": Case(
        run_script(
            loop="""
            out = model(x)
            out.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            run.backward(loss)
            """
        ),
        ("a loss over", "one factor"),
    ),
    "a hook of a parameter": Case(
        run_script(define="", optimizer="torch.optim.SGD(model.parameters(), lr=0.1)", after="").replace(
            "model, optimizer = run", "model.head.weight.register_hook(lambda grad: grad * 3)\nmodel, optimizer = run"
        ),
        ("a loss over", "one factor"),
        ("full_shard",),
    ),
    "one rank's gradients by another factor": Case(
        run_script(loop=_LOOP.replace("backward(loss)", "backward(loss * (2 if run.rank else 1))")), ("a loss over",)
    ),
    "a rank that changes its gradients": Case(
        run_script(before_step="if run.rank: [each.grad.mul_(2) for each in model.parameters()]"),
        ("not reduced", "clipping by a local norm"),
    ),
    "a rank that changes its parameters": Case(
        run_script(
            after_step="with torch.no_grad():\n    [each.mul_(0.9) for each in model.parameters() if run.rank == 0]"
        ),
        ("other parameters", "refused: "),
        ("ddp",),
    ),
    "data that each rank draws": Case(
        own_loop(
            _SLICED.replace(
                "x, y = (each[step * 24 :][:24].chunk(run.world_size)[run.rank] for each in (X, Y))",
                "at = torch.randperm(96, generator=torch.Generator().manual_seed(step * 10 + run.rank))[:8]\n"
                "    x, y = X[at], Y[at]",
            )
        ),
        ("other data",),
    ),
    "every second sample for each rank": Case(
        own_loop(
            _SLICED.replace(
                "x, y = (each[step * 24 :][:24].chunk(run.world_size)[run.rank] for each in (X, Y))",
                "x, y = (each[run.rank :: run.world_size][step * 4 :][:4] for each in (X, Y))",
            )
        ),
        ("other data",),
    ),
    "random numbers of Python": Case(
        run_script(loop="x = x * random.random()\n" + dedent(_LOOP)), ("random numbers", "other data")
    ),
    "layers that are left out by Python's numbers": Case(
        run_script(
            loop=_LOOP.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) * random.random()")
        ),
        ("random numbers",),
    ),
    "an optimizer with norms of shards": Case(
        run_script(
            define="""
            class Trust(torch.optim.Optimizer):
                def __init__(self, params): super().__init__(params, {"lr": 0.1})
                @torch.no_grad()
                def step(self, closure=None):
                    for p in self.param_groups[0]["params"]:
                        rows, grad = local(p), local(p.grad)
                        rows.sub_(grad / (grad.norm() + 1e-6) * 0.1)
            """,
            optimizer="Trust(model.parameters())",
        ),
        ("steps of shards",),
        ("full_shard",),
    ),
    "a parameter beside the model": Case(
        run_script(
            after="temperature = nn.Parameter(torch.ones(1))\nother = torch.optim.SGD([temperature], lr=0.1)",
            loop=_LOOP.replace("model(x)", "model(x) * temperature"),
            after_step="other.step(); other.zero_grad()",
        ),
        ("not reduced",),
        ("ddp",),
    ),
    "own DDP and its module": Case(own_loop(_own_ddp("model.module")), _NOT_REDUCED, ("none",)),
    "own DDP and a batch size of each rank": Case(own_loop(_own_ddp("model", "4")), ("other data",), ("none",)),
    "own DDP and a scaled rate": Case(
        own_loop(_own_ddp("model").replace("lr=0.1", "lr=0.1 * dist.get_world_size()")),
        ("learning rate",),
        ("none",),
    ),
    "fewer steps alone": Case(
        run_script().replace("steps(4)", "steps(run.world_size + 2 if run.world_size > 1 else 1)"), ("refused: ",)
    ),
}
