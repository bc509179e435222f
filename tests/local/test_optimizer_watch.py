"""Optimizers of parameters that no strategy averages, or with a state that no checkpoint has, are refused by name."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import Ranks
from tests.support.small_model import COUNTING_ELSEWHERE, SMALL_MODEL

SCRIPT = (
    SMALL_MODEL
    + """
import copy

def head_of(run, wrap=lambda module: module, make=None):
    model, optimizer = build()
    head = wrap(nn.Linear(11, 1, bias=False))
    model, optimizer = run.parallelize(model, optimizer)
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return model, head, optimizer, make(head.parameters())

def loss(run, model, head):
    return head(model(share(run, data(6, 1)[0][0])[:, :-1])).square().mean()

def with_own_optimizer(run, declare=lambda run, head, optimizer: None, **how):
    model, head, optimizer, own = head_of(run, **how)
    declare(run, head, own)
    for _ in range(2):
        loss(run, model, head).backward()
        optimizer.step(), own.step()
        optimizer.zero_grad(), own.zero_grad()
        run.step()

def in_closure(run, make):
    model, head, optimizer, own = head_of(run, make=make)
    def closure():
        own.zero_grad()
        found = loss(run, model, head)
        found.backward()
        return found
    own.step(closure)

def temperature(run):
    model, optimizer = build()
    alpha = torch.zeros(1, requires_grad=True)
    model, optimizer = run.parallelize(model, optimizer)
    own = torch.optim.Adam([alpha])
    (loss_of(model, share(run, data(6, 1)[0][0])) * alpha.exp()).backward()
    own.step()

def without_parallelize(run):
    model, optimizer = build()
    loss_of(model, share(run, data(6, 1)[0][0])).backward()
    optimizer.step()

def copied(run):
    model, optimizer = build()
    model, _ = run.parallelize(model, optimizer)
    student = copy.deepcopy(model.module)
    loss_of(student, share(run, data(6, 1)[0][0])).backward()
    torch.optim.SGD(student.parameters(), lr=0.1).step()

def target_network(run):
    model, optimizer = build()
    target = copy.deepcopy(model).requires_grad_(False)
    everything = torch.optim.SGD([*target.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    model, optimizer = run.parallelize(model, optimizer)
    found = (model(share(run, data(6, 1)[0][0])) - target(share(run, data(6, 1)[0][0]))).square().mean()
    found.backward()
    optimizer.step(), everything.step()

DDP = nn.parallel.DistributedDataParallel
ABSENT = "of SGD was frozen or absent in parallelize, so its gradient is not averaged"
"""
)


def test_what_no_strategy_averages_is_refused_unless_it_is_meant(ranks: Ranks) -> None:
    script = (
        SCRIPT
        + """
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
averaged = lambda parameters: flk.DistributedOptimizer(sgd(parameters))
# Ranks with different gradients would else call the closure, which communicates, a different number of times.
lbfgs = lambda parameters: torch.optim.LBFGS(parameters, max_iter=2, tolerance_grad=0, tolerance_change=0)
fine = {
    "per rank": lambda run: with_own_optimizer(run, lambda run, head, own: flk.per_rank(own)),
    "per rank, saved": lambda run: with_own_optimizer(run, lambda run, head, own: run.register("o", flk.per_rank(own))),
    "module per rank": lambda run: with_own_optimizer(run, lambda run, head, own: flk.per_rank(head)),
    "averaged by the script": lambda run: with_own_optimizer(run, lambda run, head, own: flk.replicated(own)),
    "own DDP": lambda run: with_own_optimizer(run, wrap=DDP),
    "DistributedOptimizer": lambda run: with_own_optimizer(run, make=averaged),
    "a target network": target_network,
}
wrong = {
    f"shape (1, 11) {ABSENT}": with_own_optimizer,
    f"of shape (1, 11) {ABSENT} ": lambda run: in_closure(run, sgd),
    "of LBFGS was frozen or absent": lambda run: in_closure(run, lbfgs),
    "of shape (1,) of Adam was frozen or absent": temperature,
    "of AdamW was frozen or absent": without_parallelize,
}
with group():
    for strategy in ("ddp", "full_shard"):
        for each in fine.values():
            with init(strategy) as run:
                each(run)
        for words, each in wrong.items():
            with init(strategy) as run:
                refused(words.strip(), lambda: each(run))
    with init("ddp") as run:
        refused(f"of shape (11, 6) {ABSENT}", lambda: copied(run))
    with init("none") as run:
        with_own_optimizer(run)
    without_parallelize(run)  # no run is open
"""
    )
    ranks(script, 2)


def test_a_single_rank_needs_no_averages_but_a_worker_does(ranks: Ranks) -> None:
    script = (
        SCRIPT
        + """
with init("ddp") as run:
    with_own_optimizer(run)
with init("diloco", diloco=flk.DiLoCo(every=1, lr=1.0, momentum=0.0)) as run:
    refused(f"of shape (1, 11) {ABSENT}", lambda: with_own_optimizer(run))
"""
    )
    ranks(script, 1)


def test_an_optimizer_that_is_in_no_checkpoint_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SCRIPT
        + COUNTING_ELSEWHERE
        + f"""
def unsaved(run, make, register=lambda run, optimizer: None):
    model, optimizer = build()[0], None
    if run.strategy == "ddp":
        optimizer = make(model.parameters())
    model = run.parallelize(model)
    optimizer = optimizer or make(model.parameters())
    register(run, optimizer)
    train(run, model, optimizer, steps=2)

def swapped(run):
    model, optimizer = run.parallelize(*build())
    train(run, model, optimizer, steps=1)
    train(run, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), steps=2, first=1)

class Twice(torch.optim.Optimizer):  # as many versions of SAM: its state_dict() lacks the state of the one inside
    def __init__(self, parameters):
        super().__init__(parameters, {{"lr": 0.1}})
        self.inside = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inside.param_groups
    def step(self):
        self.inside.step()

class Sharing(Twice):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.state = self.inside.state

def place():
    place.number += 1
    return {str(tmp_path)!r} + f"/{{place.number}}"
place.number = 0

class Keeper:  # has the state of an optimizer among others
    def __init__(self, optimizer):
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

def extended(run):
    model = build()[0]
    model, optimizer = run.parallelize(model, adam(model.blocks.parameters()))
    train(run, model, optimizer, steps=1)
    optimizer.add_param_group(dict(params=list(model.parameters())[-1:]))
    train(run, model, optimizer, steps=2, first=1)

adam = functools.partial(torch.optim.AdamW, lr=0.01)
as_it_is = lambda run, optimizer: run.register("optimizer", optimizer)
with group():
    for strategy in ("ddp", "full_shard"):
        with init(strategy, checkpoint=place()) as run:
            refused("AdamW trains the model and is in no checkpoint", lambda: unsaved(run, adam))
        for each in (swapped, lambda run: unsaved(run, Twice, as_it_is)):
            with init(strategy, checkpoint=place()) as run:
                refused("SGD trains the model and is in no checkpoint", lambda: each(run))
        with init(strategy, checkpoint=place()) as run:
            unsaved(run, Sharing, as_it_is)
        with init(strategy, checkpoint=place()) as run:
            refused("a group was added to AdamW after parallelize", lambda: extended(run))
        with init(strategy) as run:
            unsaved(run, adam)  # there are no checkpoints
        with init(strategy) as run:
            extended(run)
        with init(strategy, checkpoint=place()) as run:
            unsaved(run, functools.partial(torch.optim.SGD, lr=0.1))  # it has no state
        with init(strategy, checkpoint=place()) as run:
            unsaved(run, adam, as_it_is)
    with init("ddp", checkpoint=place()) as run:
        unsaved(run, Wrapper, as_it_is)
    with init("ddp", checkpoint=place()) as run:
        unsaved(run, adam, lambda run, optimizer: run.register("all", Keeper(optimizer)))
    for values in ({{"moments": [torch.ones(1)]}}, {{"all": {{"param_groups": []}}}}, {{"state": None}}):
        with init("ddp", checkpoint=place()) as run:
            unsaved(run, adam, lambda run, optimizer: run.register("values", values))
    with init("ddp", checkpoint=place()) as run:
        best = flk.replicated({{"loss": 9.0, "of": {{"epoch": 1}}}})
        words = "AdamW trains the model and is in no checkpoint"
        refused(words, lambda: unsaved(run, adam, lambda run, optimizer: run.register("best", best)))
"""
    )
    ranks(script, 2)


def test_a_scheduler_that_is_in_no_checkpoint_is_refused_in_each_attempt(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SMALL_MODEL
        + f"""
from torch.optim import lr_scheduler
warnings.filterwarnings("ignore", message="Detected call of")  # a script catches up, and a step is skipped
factor = lambda step: 1 / (1 + step)

def attempt(place, until, make, register=lambda run, schedule: None, momentum=0, skipped=0):
    with init("ddp", checkpoint=place and {str(tmp_path)!r} + "/" + place, save_every=1) as run:
        model = build()[0]
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
        schedule = make(run, optimizer)
        register(run, schedule)
        for number, parts in enumerate(data(6, 1)[run.steps : until]):
            loss_of(model, share(run, parts[0])).backward()
            if number >= skipped:  # as by GradScaler
                optimizer.step()
            schedule.step(), optimizer.zero_grad(), run.step()
        return run.steps, optimizer.param_groups[0]["lr"]

def anew(run, optimizer):
    return lr_scheduler.LambdaLR(optimizer, factor)

def by_count(run, optimizer):
    return lr_scheduler.LambdaLR(optimizer, factor, last_epoch=run.steps - 1)

def by_steps(run, optimizer):
    schedule = anew(run, optimizer)
    for _ in range(run.steps):
        schedule.step()
    return schedule

def by_run(run, optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda _: factor(run.steps + 1))

def in_a_row(run, optimizer):
    halves = [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, halves, [2])

def in_values(run, schedule):
    values, step = schedule.state_dict(), schedule.step
    run.register("values", flk.replicated(values))
    schedule.load_state_dict(values)
    schedule.step = lambda: (step(), values.update(last_epoch=schedule.last_epoch))

def below_values(run, schedule):
    values, begun, step = {{}}, schedule.state_dict(), schedule.step
    run.register("values", values)
    schedule.load_state_dict(values.setdefault("schedule", begun))
    schedule.step = lambda: (step(), values["schedule"].update(last_epoch=schedule.last_epoch))

registered = lambda run, schedule: run.register("scheduler", schedule)
best = lambda run, schedule: run.register("best", {{"loss": 9.0, "of": {{"epoch": 1}}}})
words = "the learning rate scheduler of SGD is in no checkpoint, so it may begin anew after a restart: call run.reg"
with group():
    for make in (anew, by_count, by_steps, by_run, in_a_row):
        name = make.__name__
        undisturbed = attempt(None, 4, make)
        for momentum in (0, 0.9):
            refused(words, lambda: attempt("refused " + name, 1, make, momentum=momentum))
        attempt(name, 2, make, registered)
        assert attempt(name, 4, make, registered) == undisturbed, name
    refused(words, lambda: attempt("best", 1, anew, best))
    attempt("skipped", 1, anew, skipped=1)
    refused(words, lambda: attempt("skipped", 3, anew, skipped=1))
    undisturbed = attempt(None, 4, anew)
    for register in (in_values, below_values):
        attempt(register.__name__, 2, anew, register)
        assert attempt(register.__name__, 4, anew, register) == undisturbed
"""
    )
    ranks(script, 2)
    assert not list(tmp_path.glob("refused*/step-*"))  # nothing was trained
