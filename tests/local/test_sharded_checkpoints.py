"""Checkpoints of sharded models: from any strategy and world size to any other, and as torch itself reads them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import load_with_torch
from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

FEW = ("ddp", "full_shard", "hybrid_shard_zero2")

# A run of at most 6 steps that saves at its end, or more often, in a folder under $BASE.
GO = (
    SMALL_MODEL
    + """
base = os.environ["BASE"]

def go(folder, name, steps, precision=None, shard_size=2, save_every=0):
    with init(name, save_every=save_every, checkpoint=f"{base}/{folder}") as run:
        size = min(shard_size, run.world_size)
        options = {"shard_size": size} if name.startswith("hybrid") else {}
        pair = run.parallelize(*build(), precision=precision, **options)
        return train(run, *pair, steps=steps, first=run.steps)
"""
)


# Each strategy trains 4 steps, and resumes from its checkpoint of step 2, also under another strategy.
TRAINED = (
    GO
    + f"""
with group():
    for name, other in zip({FEW}, {FEW[1:] + FEW[:1]}):
        whole = go(f"{{name}}-whole", name, 4, save_every=2)
        if dist.get_rank() == 0:
            for copy in (name, f"{{name}}-begun", f"{{name}}-other"):
                shutil.copytree(f"{{base}}/{{name}}-whole/step-000000002", f"{{base}}/{{copy}}/step-000000002")
        dist.barrier()
        tell(name, [whole[2:], go(name, name, 4), go(f"{{name}}-other", other, 4)])
    go("low", "full_shard", 2, flk.Precision())
    tell("shapes", {{name: list(value.shape) for name, value in build()[0].state_dict().items()}})
"""
)
of_one_run = pytest.mark.xdist_group("sharded checkpoints")


@dataclass(frozen=True)
class Trained:
    """Checkpoints that 4 ranks have made, and the last losses of each strategy: undisturbed, resumed, and resumed under
    another strategy."""

    folder: Path
    losses: dict[str, list[list[float]]]
    shapes: dict[str, list[int]]

    @property
    def undisturbed(self) -> list[float]:
        return self.losses["ddp"][0]


@pytest.fixture(scope="module")
def trained(fork_server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    found = told(Ranks(fork_server, folder)(TRAINED, 4, {"BASE": str(folder)})[0])
    shapes = found.pop("shapes")
    assert found.keys() == set(FEW)
    return Trained(folder, found, shapes)


def objects(folder: Path, step: int = 4) -> dict[str, Any]:
    return load_with_torch(folder / f"step-{step:09d}")


@of_one_run
def test_a_resumed_run_ends_bit_equal_under_every_strategy(trained: Trained) -> None:
    for case, (whole, resumed, _) in trained.losses.items():
        assert whole == resumed, case
        assert whole == pytest.approx(trained.undisturbed, abs=1e-6), case
        one, other = objects(trained.folder / case), objects(trained.folder / f"{case}-whole")
        assert one["model"].keys() == other["model"].keys()
        assert all(torch.equal(value, other["model"][key]) for key, value in one["model"].items()), case
        for name, state in one["optimizer"]["state"].items():
            for key, value in state.items():
                expected = other["optimizer"]["state"][name][key]
                assert torch.equal(value, expected), (case, name, key, value, expected)


@pytest.mark.promise("Checkpoints: A resume is bit-equal at the same number of ranks, and takes each sample once")
@of_one_run
def test_resume_under_another_strategy(trained: Trained) -> None:
    for case, (_, _, resumed) in trained.losses.items():
        assert resumed == pytest.approx(trained.undisturbed, abs=1e-6), case


@pytest.mark.promise("Checkpoints: Torch reads them without flk")
@of_one_run
def test_torch_reads_full_tensors_by_the_models_own_names(trained: Trained) -> None:
    for folder in [*FEW, "low"]:
        content = objects(trained.folder / folder, 2 if folder == "low" else 4)
        assert {name: list(value.shape) for name, value in content["model"].items()} == trained.shapes, folder
        assert {value.dtype for value in content["model"].values()} == {torch.float32}, folder  # the master weights
        averages = [list(state["exp_avg"].shape) for state in content["optimizer"]["state"].values()]
        made = [shape for name, shape in trained.shapes.items() if name != "scale"]
        assert sorted(averages) == sorted(made), folder


@of_one_run
def test_resume_at_another_world_size(ranks: Ranks, trained: Trained, tmp_path: Path) -> None:
    cases = FEW[1:]
    for name in cases:
        shutil.copytree(trained.folder / f"{name}-begun", tmp_path / name)
    script = GO + f"with group():\n    for name in {cases}:\n        tell(name, go(name, 'full_shard', 4))\n"
    found = told(ranks(script, 2, {"BASE": str(tmp_path)})[0])
    assert found == dict.fromkeys(cases, pytest.approx(trained.undisturbed, abs=1e-6))


MADE_BY_THE_SCRIPT = (
    GO
    + """
def go_made(folder, name, steps, parts):
    # An optimizer of one or more models, which is made after parallelize and registered.
    losses = []
    with init(name, save_every=0, checkpoint=f"{base}/{folder}") as run:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(7, 30), nn.Linear(30, 7)) for _ in range(parts)]
        models = [run.parallelize(model) for model in models]
        optimizer = torch.optim.AdamW([each for model in models for each in model.parameters()])
        run.register("optimizer", optimizer)
        while run.steps < steps:
            x = torch.randn(8, 7, generator=torch.Generator().manual_seed(run.steps * 10 + run.rank))
            for model in models:
                x = model(x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(run.mean(x.square().mean().item()))
            run.step()
    return losses

def tell_resumed(case, name, parts):
    resumed = [go_made(case, name, steps, parts) for steps in (2, 4)]
    tell(case, [go_made(case + "-whole", name, 4, parts), sum(resumed, [])])
"""
)
SOME_CASES = ("ddp", "full_shard")


@pytest.mark.promise("Checkpoints: State of optimizers comes back to its parameter, or is refused")
def test_an_optimizer_that_is_made_after_parallelize_and_registered(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        MADE_BY_THE_SCRIPT
        + f"""
with group():
    for name in {SOME_CASES}:
        for parts in (1, 2):
            tell_resumed(f"{{name}}-{{parts}}", name, parts)
"""
    )
    found = told(ranks(script, 2, {"BASE": str(tmp_path)})[0])
    assert found.keys() == {f"{name}-{parts}" for name in SOME_CASES for parts in (1, 2)}
    for case, (whole, resumed) in found.items():
        assert whole == resumed, case
        assert whole == pytest.approx(found[f"ddp-{case[-1]}"][0], abs=1e-5), case
    steps = {name: state["step"].item() for name, state in objects(tmp_path / "ddp-2", 4)["optimizer"]["state"].items()}
    assert steps == {f"{model}.{name}": 4 for model in ("model", "model-1") for name in PARAMETERS}


PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias")

ORDERS = (
    GO
    + """
class Net(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.scale = 1.0
        for name in order:
            self.add_module(name, nn.Linear(3, 3))
    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.scale

def go_in_order(folder, name, steps, order, declare=lambda optimizer: optimizer):
    with init(name, save_every=0, checkpoint=f"{base}/{folder}") as run:
        torch.manual_seed(0)
        net = Net(order)
        for each in (net.a, net.b):
            nn.init.normal_(each.weight)
        model = run.parallelize(net)
        reference = run.parallelize(Net("ab").requires_grad_(False))
        parameters = list(model.parameters())[:: -1 if run.rank else 1]  # in another order on each rank
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        run.register("optimizer", declare(optimizer))
        while run.steps < steps:
            x = torch.arange(6.0).view(2, 3)[run.rank % 2 :] / 5
            (model(x) - reference(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
        named = dict(net.named_parameters())
        values = [named[key] for key in sorted(named)]
        values = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in values]
        return [each.tolist() for each in values]

with group():
    for name in ("ddp", "full_shard"):
        whole = go_in_order(f"{name}-whole", name, 4, "ab")
        go_in_order(name, name, 2, "ab")
        tell(name, [whole, go_in_order(name, name, 4, "ba")])
    go_in_order("declared", "ddp", 1, "ab", flk.replicated)
    again = functools.partial(go_in_order, "declared", steps=2)
    refused("its parameters in another order", lambda: again(name="ddp", order="ba", declare=flk.replicated))
    refused("pass the optimizer through the same call", lambda: again(name="full_shard", order="ab"))
"""
)


def test_state_belongs_to_parameters_by_name_whatever_their_order_on_a_rank(ranks: Ranks, tmp_path: Path) -> None:
    found = told(ranks(ORDERS, 2, {"BASE": str(tmp_path)})[0])
    assert found.keys() == {"ddp", "full_shard"}
    for case, (whole, resumed) in found.items():
        for one, other in zip(whole, resumed, strict=True):
            assert torch.tensor(other) == pytest.approx(torch.tensor(one), abs=1e-6), case


REFUSED = (
    GO
    + """
class Copy:
    def __init__(self, model):
        self.model = model
    def state_dict(self):
        return {"weight": self.model.weight.detach().clone()}
    def load_state_dict(self, state):
        pass

with group():
    with init("full_shard", checkpoint=f"{base}/checkpoints") as run:
        model = run.parallelize(nn.Linear(2, 2))
        temperature = nn.Parameter(torch.ones(()))
        mixed = torch.optim.SGD([*model.parameters(), temperature])
        refused(
            "'mixed' is an optimizer of 3 parameters, and 1 of them are in no parallelized model: make an optimizer",
            lambda: run.register("mixed", mixed),
        )
        run.register("temperature", torch.optim.SGD([temperature]))  # of which rank 0's state is saved
        run.step()
        run.save(wait=True)
        run.register("copy", Copy(model))
        refused("cannot save 'copy.weight': it is sharded over the ranks", lambda: run.save())
        run.abandon()
    tell("rank", run.rank)
"""
)


def test_sharded_states_that_cannot_be_saved_are_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ended = ranks(REFUSED, 2, {"BASE": str(tmp_path)})
    assert [told(each) for each in ended] == [{"rank": 0}, {"rank": 1}]


def test_tensors_without_elements_are_saved_and_restored(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SMALL_MODEL
        + f"""
def go(folder, name, steps):
    with init(name, save_every=0, checkpoint={str(tmp_path)!r} + f"/{{folder}}") as run:
        model, optimizer = build()
        model.register_buffer("nothing", torch.zeros(0, 3))
        for shape in ((3, 0), (0,)):
            setattr(model.blocks[0], f"none{{len(shape)}}", nn.Parameter(torch.zeros(shape), requires_grad=False))
        model, optimizer = run.parallelize(model, optimizer)
        return train(run, model, optimizer, steps=steps, first=run.steps)

with group():
    assert len(go("a", "ddp", 1) + go("a", "full_shard", 2) + go("a", "ddp", 3)) == 3
"""
    )
    ranks(script, 2)
