"""Several optimizers of one model: each trains, is saved and restored; one that would train nothing is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flk_runtime.contract import user_env
from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

# Matrices and vectors have an optimizer and a schedule each. The step of a matrix depends on all of its elements.
SEVERAL = (
    SMALL_MODEL
    + """
class Normalized(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                average = self.state[each].setdefault("average", torch.zeros_like(each))
                average.mul_(0.5).add_(each.grad)
                each.sub_(average / average.norm() * group["lr"])

def split(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return Normalized(matrices, lr=0.1), torch.optim.AdamW(vectors, lr=0.02)

def schedules(optimizers):
    pairs = zip(optimizers, (0.8, 0.5))
    return [torch.optim.lr_scheduler.LinearLR(each, factor, total_iters=6) for each, factor in pairs]

class All:
    # Several optimizers, and the schedule of each, as one.
    def __init__(self, *parts):
        self.parts = parts
    def zero_grad(self):
        for each in self.parts:
            getattr(each, "zero_grad", int)()
    def step(self):
        for each in self.parts:
            each.step()
"""
)


def test_several_optimizers_and_their_schedules_train_and_resume_as_in_one_process(
    ranks: Ranks, tmp_path: Path
) -> None:
    script = (
        SEVERAL
        + f"""
def go(name, steps, strategy=None, declare=None):
    with init(strategy or name, checkpoint={str(tmp_path)!r} + f"/{{name}}-{{os.environ.get('WORLD_SIZE')}}") as run:
        model = build()[0]
        if declare:
            model = run.parallelize(model)
            optimizers = split(model)
            for number, each in enumerate(optimizers):
                run.register(f"declared-{{number}}", declare(each))
        else:
            optimizers = split(model)
            model, found = run.parallelize(model, optimizers)
            assert found is optimizers
        both = schedules(optimizers)
        for number, each in enumerate(both):
            run.register(f"schedule-{{number}}", each)
        return train(run, model, All(*optimizers, *both), steps=steps, first=run.steps)

import flk_diloco
alone = flk_diloco.DiLoCo(every=1, lr=1.0, momentum=0.0, inner="full_shard")
with group():
    for name in ("ddp", "full_shard") if "RANK" in os.environ else ("none",):
        tell(name, go(name, 2) + go(name, 4) if "RANK" in os.environ else go(name, 4))
    if "RANK" in os.environ:
        tell("diloco", go("diloco", 2, strategy=alone) + go("diloco", 4, strategy=alone))
        whole = dict(strategy="ddp", declare=flk.replicated)
        tell("whole", go("whole", 2, **whole) + go("whole", 4, **whole))
        for kind, rate in ((torch.optim.Adam, 0.5), (torch.optim.AdamW, 0.25)):
            with init("ddp", checkpoint={str(tmp_path)!r} + "/adam") as run:
                model = build()[0]
                model, optimizer = run.parallelize(model, kind(model.parameters(), lr=0.1))
                optimizer.param_groups[0]["lr"] = rate  # by the script, which stays
                run.register("scaler", torch.amp.GradScaler("cpu"))
                train(run, model, optimizer, steps=run.steps + 1)
                group = optimizer.param_groups[0]
                assert group["lr"] == rate
                assert group.get("decoupled_weight_decay", True) or kind is torch.optim.Adam
"""
    )
    expected = told(ranks(script, 1)[0])["none"]
    assert len(expected) == 4
    found = told(ranks(script, 2)[0])
    assert len(found) == 4
    assert found == {name: pytest.approx(expected, abs=1e-5) for name in found}


@pytest.mark.promise("Training: What would train wrongly without a word is right or refused by name")
def test_an_optimizer_that_would_train_nothing_is_refused(ranks: Ranks) -> None:
    script = (
        SEVERAL
        + """
class Caching(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.cache = {"first": [self.param_groups[0]["params"][0]]}

def step_of_others(run):
    model = build()[0]
    first, second = split(model)
    others = [second]
    model, first = run.parallelize(model, first)
    loss_of(model, data(6, 1)[0][0][run.rank]).backward()
    first.step()
    others[0].step()

def register_late(run):
    model = build()[0]
    first, second = split(model)
    run.parallelize(model, first)
    run.register("second", second)

def tied_models(run):
    first, second = build()[0], build()[0]
    second.head.weight = first.head.weight
    run.parallelize(first)
    run.parallelize(second)

def without_any(run):
    model = build()[0]
    optimizer = torch.optim.LBFGS(model.parameters())
    model = run.parallelize(model)
    optimizer.step(lambda: loss_of(model, data(6, 1)[0][0][run.rank]))

def of(kind):
    def parallelize(run):
        model = build()[0]
        run.parallelize(model, [kind(model.parameters())])
    return parallelize

def scheduler(run):
    model, optimizer = build()
    run.parallelize(model, [optimizer, schedules([optimizer])[0]])

with group():
    for words, action in (
        ("AdamW holds the parameter 'blocks.0.norm.weight' and 9 more that parallelize has replaced", step_of_others),
        ("AdamW holds the parameter 'blocks.0.norm.weight' and 9 more that parallelize has replaced", register_late),
        ("'head.weight' was shared with a model that has been parallelized", tied_models),
        ("LBFGS holds the parameter 'embedding.weight' and 15 more that parallelize has replaced", without_any),
        ("Caching keeps the parameter 'embedding.weight' in its attribute 'cache' too", of(Caching)),
        ("LBFGS of torch cannot train parameters that strategy full_shard shards", of(torch.optim.LBFGS)),
        ("Adafactor of torch cannot train parameters", of(torch.optim.Adafactor)),
        ("Rprop of torch cannot train parameters", of(torch.optim.Rprop)),
        ("takes optimizers of torch, and was given a LinearLR", scheduler),
    ):
        with init("full_shard") as run:
            refused(words, lambda: action(run))
    with init("ddp") as run:  # which replaces no parameters
        step_of_others(run)
        of(Caching)(run)
    with init("ddp") as run:
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.parallelize(model, init="reset_parameters")
        refused("SGD holds the parameter 'weight' and 1 more", optimizer.step)
"""
    )
    ranks(script, 2)


LIBRARIES = (
    SMALL_MODEL
    + """
warnings.filterwarnings("ignore", category=UserWarning)  # of torch's DTensor, about what it falls back to
import pytorch_optimizer, schedulefree
from transformers.optimization import Adafactor

class Quantized(torch.optim.Optimizer):  # keeps its momentum in 8 bits, with a scale for each 16 elements
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                state, padding = self.state[each], -each.numel() % 16
                momentum = F.pad(each.grad.flatten(), (0, padding)).view(-1, 16)
                if state:
                    momentum += 0.9 * state["codes"] * state["scales"]
                state["scales"] = momentum.abs().amax(1, keepdim=True) / 127
                state["codes"] = (momentum / state["scales"].clamp(min=1e-12)).round().to(torch.int8)
                each.sub_(momentum.flatten()[: each.numel()].view(each.shape), alpha=group["lr"])

def matrices(parameters):
    return [each for each in parameters if each.dim() == 2]

KINDS = {
    "SOAP": lambda all: pytorch_optimizer.SOAP(all, precondition_frequency=2),
    "AdamWScheduleFree": lambda all: schedulefree.AdamWScheduleFree(all, lr=3e-3),
    "Muon": lambda all: torch.optim.Muon(matrices(all), lr=3e-3),
    "Adafactor": lambda all: Adafactor(all, lr=3e-3, relative_step=False, scale_parameter=False),
    "Quantized": Quantized,
}

def go(name, kind):
    with init(name) as run:
        model = build()[0]
        optimizer = KINDS[kind](list(model.parameters()))
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # it wraps the step too
        getattr(optimizer, "train", int)()
        model, optimizer = run.parallelize(model, optimizer)
        return train(run, model, optimizer)

with group():
    for name in ("full_shard",) if "RANK" in os.environ else ("none",):
        for kind in KINDS:
            try:
                tell(f"{kind} {name}", go(name, kind))
            except Exception as error:  # of DTensor
                tell(f"{kind} {name}", str(error))
"""
)
OF_WHOLE_PARAMETERS = ("SOAP", "Adafactor", "Quantized")


@pytest.mark.soak
def test_optimizers_of_libraries_train_as_in_one_process_or_end_with_an_error(ranks: Ranks) -> None:
    for library in ("pytorch_optimizer", "schedulefree", "transformers"):
        pytest.importorskip(library)
    expected = told(ranks(LIBRARIES, 1)[0])
    found = told(ranks(LIBRARIES, 2)[0])
    assert len(found) == len(expected) == 5
    for key, losses in found.items():
        kind, _, strategy = key.rpartition(" ")
        if strategy == "full_shard" and kind in OF_WHOLE_PARAMETERS:
            assert isinstance(losses, str), key
        else:
            # Muon multiplies in bfloat16, and the last bits decide on SOAP's basis where few steps have been made.
            near = {"Muon": 1e-4, "SOAP": 2e-3}.get(kind, 1e-5)
            assert losses == pytest.approx(expected[f"{kind} none"], abs=near), key


# Optimizers that compute with each rank's shards, as plain tensors, and keep their state so.
OF_SHARDS = (
    SMALL_MODEL
    + """
def shard(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            state, gradient = self.state[each], shard(each.grad)
            self.keep(state, 0.9 * self.kept(state, gradient) + gradient)
            shard(each).sub_(self.kept(state, gradient), alpha=0.05)

    def keep(self, state, momentum):
        state["momentum"] = momentum

    def kept(self, state, gradient):
        return state.get("momentum", torch.zeros_like(gradient))

class Flat(Momentum):
    def keep(self, state, momentum):
        state["flat"] = momentum.flatten()

    def kept(self, state, gradient):
        return state["flat"].view(gradient.shape) if state else torch.zeros_like(gradient)

def go(strategy, kind, steps, place, later=False):
    with init(strategy, checkpoint=os.environ["FOLDER"] + place) as run:
        model = build()[0]
        if later:
            model = run.parallelize(model)
            optimizer = kind(model.parameters())
            run.register("optimizer", flk.per_rank(optimizer))
        else:
            model, optimizer = run.parallelize(model, kind(model.parameters()))
        losses = train(run, model, optimizer, steps, first=run.steps)
        run.save()  # in the block, which is left without a save after an error
        return losses
"""
)


def test_state_of_shards_is_saved_and_restored_as_theirs_or_refused(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        OF_SHARDS
        + """
with group():
    tell("full_shard", go("full_shard", Momentum, 2, "own"))
    words = "Flat keeps 'flat' of 'embedding.weight' in another shape than this rank's shard of it"
    refused(words, lambda: go("full_shard", Flat, 2, "flat"))
    tell("per rank", sum((go("full_shard", Flat, until, "per rank", later=True) for until in (2, 4)), []))
"""
    )
    alone = (
        OF_SHARDS
        + """
with group():
    tell("found", go(os.environ["FLK_STRATEGY"], Momentum, 4, os.environ["PLACE"]))
"""
    )
    variables = {"FOLDER": f"{tmp_path}/", user_env.STRATEGY: "none", "PLACE": "one"}
    (one,) = ranks(alone, 1, variables)
    expected = told(one)["found"]
    found = told(ranks(script, 2, variables)[0])
    assert found["per rank"] == pytest.approx(expected, abs=1e-6)
    for world_size, strategy in ((4, "full_shard"), (1, "none")):
        shutil.copytree(tmp_path / "own", tmp_path / f"own-{world_size}")
        other = variables | {user_env.STRATEGY: strategy, "PLACE": f"own-{world_size}"}
        rest = told(ranks(alone, world_size, other)[0])["found"]
        assert found["full_shard"] + rest == pytest.approx(expected, abs=1e-6), world_size


def test_lists_of_shards_in_the_state_of_an_optimizer_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SMALL_MODEL
        + """
class History(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            past = self.state[each].setdefault("past", [])
            past.append(each.grad.clone())
            each.sub_(sum(past[-2:]), alpha=0.05)

class OfShards(History):  # keeps plain tensors
    @torch.no_grad()
    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            shard, gradient = (getattr(one, "to_local", lambda: one)() for one in (each, each.grad))
            past = self.state[each].setdefault("past", [])
            past.append(gradient.clone())
            shard.sub_(sum(past[-2:]), alpha=0.05)

def fit(strategy, kind):
    with init(strategy, checkpoint=f"{os.environ['PLACE']}/{strategy}-{kind.__name__}") as run:
        model = build()[0]
        model, optimizer = run.parallelize(model, kind(model.parameters()))
        train(run, model, optimizer, steps=2)
        run.save()  # in the block, which is left without a save after an error

with group():
    for kind, words in (
        (History, "cannot save 'optimizer.values.embedding.weight.past.0': it is sharded over the ranks"),
        (OfShards, "'past.0' of 'blocks.0.up.bias' of optimizer is a tensor of torch.float32 (13,) on rank 0"),
    ):
        fit("ddp", kind)
        refused(words, lambda: fit("full_shard", kind))
"""
    )
    ranks(script, 2, {"PLACE": str(tmp_path)})


def test_an_optimizer_around_another_one_needs_no_constructor_of_torchs(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SMALL_MODEL
        + """
class Slow(torch.optim.Optimizer):
    def __init__(self, inside):
        self.inside, self.param_groups, self.state = inside, inside.param_groups, {}

    def step(self, closure=None):
        self.inside.step(closure)
        with torch.no_grad():
            for each in (each for group in self.param_groups for each in group["params"]):
                each.mul_(0.9)

    def state_dict(self):
        return self.inside.state_dict()

    def load_state_dict(self, state):
        self.inside.load_state_dict(state)

def go(place, strategy, steps, late):
    with init(strategy, checkpoint=os.environ["PLACE"] + place) as run:
        model, inside = build()
        if late:
            model = run.parallelize(model)
            optimizer = Slow(torch.optim.AdamW(model.parameters(), lr=0.01))
            run.register("optimizer", optimizer)
        else:
            model, optimizer = run.parallelize(model, Slow(torch.optim.AdamW(model.parameters(), lr=0.01)))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # of groups that are those of the one inside
        run.register("schedule", schedule)
        losses = []
        for step in range(run.steps, steps):
            losses += train(run, model, optimizer, step + 1, first=step)
            schedule.step()
        with run.no_sync():
            loss_of(model, data(6, 1)[0][0][run.rank]).backward()
        if strategy == "full_shard":
            refused("before optimizer.step() was in no_sync", optimizer.step)
    return losses

with group():
    for strategy in ("ddp", "full_shard"):
        for late in (False, True):
            place = f"{strategy}-{late}"
            tell(place, go(place, strategy, 1, late) + go(place, strategy, 4, late))
    tell("whole", go("whole", "ddp", 4, False))
"""
    )
    found = told(ranks(script, 2, {"PLACE": f"{tmp_path}/"})[0])
    expected = found.pop("whole")
    assert len(found) == 4
    for key, losses in found.items():
        assert losses == pytest.approx(expected, abs=1e-5), key
