"""Calls and layouts of a sharded model, and what its steps cost beside those by hand."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

SCRIPT = (
    SMALL_MODEL
    + """
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

def fit(run, model, loss_of, **options):
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    seen = []
    for parts in data(6, 1)[:3, 0]:
        optimizer.zero_grad()
        loss = loss_of(model, share(run, parts))
        loss.backward()
        optimizer.step()
        run.step()
        seen.append(run.mean(loss.item()))
    return seen

def channels_last(run):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 7, 11))
    def loss(model, words):
        images = F.one_hot(words, 11).float()[:, :, :9].view(-1, 3, 3, 9)
        return model(images.to(memory_format=torch.channels_last)).square().mean()
    return fit(run, model.to(memory_format=torch.channels_last), loss)

class Methods(Net):
    def loss(self, words):
        logits = Net.forward(self, words[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

def method(run):
    torch.manual_seed(3)
    model = Methods()
    def loss(model, words):
        if not hasattr(model, "registered"):
            register_fsdp_forward_method(model, "loss")  # it does nothing under another strategy
            model.registered = True
            assert getattr(model, "_is_fsdp_managed_module", False) == isinstance(model, FSDPModule)
        return model.loss(words)
    return fit(run, model, loss)

class Tempered(Net):
    heat = 1.0

    def forward(self, words):
        return super().forward(words) * self.heat * getattr(self, "gain", 1.0)

def tempered(run):
    torch.manual_seed(3)
    def loss(model, words):
        model.heat, model.gain = 0.5 * model.heat, 2.0
        model.kept = 1
        del model.kept
        assert not hasattr(model, "kept")
        return loss_of(model, words)
    return fit(run, Tempered(), loss)

with group():
    for each, strategy in ((channels_last, "full_shard"), (method, "full_shard"), (tempered, "ddp")):
        with init(strategy if "RANK" in os.environ else "none") as run:
            tell(each.__name__, each(run))
"""
)


def test_calls_train_as_in_one_process(ranks: Ranks) -> None:
    expected = told(ranks(SCRIPT, 1)[0])
    found = told(ranks(SCRIPT, 2)[0])
    assert len(found) == 3
    assert found == {key: pytest.approx(losses, abs=1e-5) for key, losses in expected.items()}


COSTS = (
    SMALL_MODEL
    + """
import warnings
from collections import Counter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operation, kinds, arguments=(), options=None):
        if operation.namespace != "profiler":
            self.seen[str(operation)] += 1
        return operation(*arguments, **(options or {}))

def operations(model, optimizer):
    words = data(1, 1)[0, 0].flatten(0, 1)
    def step():
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):  # the first step makes the state of the optimizer, and what later ones reuse
        step()
    with Operations() as mode:
        step()
    return mode.seen

class Outer(nn.Sequential):  # a unit whose parameters are in units inside, and whose output is a view
    def forward(self, x):
        return super().forward(x).transpose(-1, -2).transpose(-1, -2)

class InUnits(nn.Module):  # no parameter is outside of blocks
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 11), nn.ModuleList([Block(11)])
        self.outer = Outer(Block(11))

    def forward(self, words):
        return self.outer(self.blocks[0](self.embed(words)))

warnings.simplefilter("ignore", UserWarning)  # torch warns of outputs that are views
with group():
    with init("full_shard") as run:
        for kind, unused in ((Net, False), (Net, True), (InUnits, False)):
            blocks = [Block] if kind is Net else [Block, nn.Embedding, Outer]
            plain = type("ByHand", (kind,), {})()
            mesh = init_device_mesh("cpu", (run.world_size,))
            for block in reversed([each for each in plain.modules() if isinstance(each, tuple(blocks))]):
                fully_shard(block, mesh=mesh)
            fully_shard(plain, mesh=mesh, reshard_after_forward=False)
            if unused:
                for each in plain.modules():
                    if isinstance(each, FSDPModule):
                        each.set_reduce_scatter_unused_params(True, recurse=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = operations(plain, torch.optim.AdamW(plain.parameters()))
            model = kind()
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = run.parallelize(model, optimizer, blocks=blocks, find_unused_parameters=unused)
            seen = operations(model, optimizer)
            assert seen == expected, (kind, unused, seen - expected, expected - seen)
"""
)


def test_a_sharded_step_computes_what_one_by_hand_does(ranks: Ranks) -> None:
    ranks(COSTS, 2)
