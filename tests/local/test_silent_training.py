"""Scripts whose training a strategy would change without a word: each trains as one process does, or is refused."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

SCRIPT = (
    SMALL_MODEL
    + """
def made(run, **options):
    model = build()[0]
    return run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

def loss(run, model, step=0):
    return loss_of(model, share(run, data(6, 1)[step][0]))

def changed_after_an_evaluation(run):
    model, optimizer = made(run)
    seen = []
    for step in range(4):
        found = loss(run, model, step)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss(run, model, step)  # leaves full parameters
            for each in model.parameters():
                each.mul_(0.8)
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def shared_modules(run):
    model = build()[0]
    model.blocks[1].up = model.blocks[0].up
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return train(run, model, optimizer, steps=3)

class InPlace(Net):
    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            y = block(x)  # a view, since its last layer has a bias
            y += x
            x = y
        return self.head(x)

def changed_outputs(run):
    model = build()[0]
    model.__class__, model.norm = InPlace, nn.Identity()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return train(run, model, optimizer, steps=3)

def frozen_in_the_middle(run):
    model, optimizer = made(run, find_unused_parameters=True)
    blocks = (model.module if hasattr(model, "module") else model).blocks
    seen = []
    for step in range(4):
        blocks[0].requires_grad_(step < 2)
        blocks[1].requires_grad_(step != 1)
        seen += train(run, model, optimizer, step + 1, first=step)
    return seen

class Clamped(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)

def clamped(run):
    model = build()[0]
    model.blocks = nn.ModuleList(Clamped(6) for _ in range(2))
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return train(run, model, optimizer, steps=2)

def lazy(run):
    run.parallelize(nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2)))

def bounded(run):
    model = build()[0]
    model.embedding.max_norm = 0.5
    run.parallelize(model)

def twice(run):
    model, _ = made(run)
    found = loss(run, model)
    found.backward(retain_graph=True)
    (2 * found).backward()

def wrapped_but_not_called(run):
    loss(run, made(run)[0].module).backward()

def called_in_no_sync(run):
    model, _ = made(run)
    with run.no_sync():
        found = loss(run, model)
    found.backward()

def steps_in_hooks(run):
    model, _ = made(run)
    for each in model.parameters():
        own = torch.optim.SGD([each], lr=0.1)
        each.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    loss(run, model).backward()

def thawed(run):
    model = build()[0]
    model.head.requires_grad_(False)
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.module.head.requires_grad_(True)
    loss(run, model).backward()
    optimizer.step()

def added(run):
    model, optimizer = made(run)
    scale = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [scale]})
    (loss(run, model) * scale).backward()
    optimizer.step()

def hooked(run, late):
    model = build()[0]
    model = run.parallelize(model) if late else model
    model.head.weight.register_hook(lambda gradient: gradient / 2)
    run.parallelize(model)

def assigned(run):
    model, _ = made(run)
    model.head.weight.data = model.head.weight.data * 2

def measured(run):
    model, _ = made(run)
    loss(run, model).backward()
    norm = model.head.weight.grad.norm()
    whole = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    assert float(norm.full_tensor()) < whole
    norm.item()

def own_gradients(run):
    model, optimizer = made(run)
    parameters = list(model.parameters())
    for each, gradient in zip(parameters, torch.autograd.grad(loss(run, model), parameters)):
        each.grad = gradient
    optimizer.step()

def grad_of_shards(run, **options):
    model, _ = made(run)
    parameters = list(model.parameters())
    torch.autograd.grad(loss(run, model), parameters, **options)

def backward_into(run):
    model, _ = made(run)
    loss(run, model).backward(inputs=list(model.parameters()))

def grad_of_a_penalty(run):  # of the parameters themselves, which needs no forward pass
    model, _ = made(run)
    found, = torch.autograd.grad(model.head.weight.square().sum(), model.head.weight)
    assert torch.equal(found.full_tensor(), 2 * model.head.weight.full_tensor())

def functional(run, change):
    model, _ = made(run)
    values = {name: change(each) for name, each in model.named_parameters()}
    torch.func.functional_call(model, values, (torch.ones(2, 3, dtype=torch.int64),))

def penalized(run):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    model = run.parallelize(model)
    x = torch.ones(2, 4, requires_grad=True)
    slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()

with group():
    if "RANK" not in os.environ:
        with init("none") as run:
            for each in (changed_after_an_evaluation, shared_modules, changed_outputs, frozen_in_the_middle):
                tell(each.__name__, each(run))
        with init("ddp") as run:
            bounded(run)  # it changes all that it should in one process
    for strategy in ("ddp", "full_shard") if "RANK" in os.environ else ():
        for each in (changed_after_an_evaluation, shared_modules, changed_outputs, frozen_in_the_middle):
            with init(strategy) as run:
                tell(f"{each.__name__} {strategy}", each(run))
        wrong = {"has a max_norm": bounded, "of shape (1,) of SGD was frozen or absent": added}
        wrong["'0.weight' of a lazy module has no shape yet"] = lazy
        if strategy == "full_shard":
            wrong |= {
                "Clamped changes its parameter 'up.weight'": clamped,
                "'head.weight' has hooks, which strategy full_shard": functools.partial(hooked, late=False),
                "register_hook of a sharded parameter": functools.partial(hooked, late=True),
                "create_graph=True, as for a gradient penalty": penalized,
                "such as a norm, would give a value of this rank's shards alone": measured,
                "torch.autograd.grad of sharded parameters gives no gradients": grad_of_shards,
                "gives no gradients: call backward()": functools.partial(grad_of_shards, allow_unused=True),
                "backward(inputs=) with sharded parameters gives no gradients": backward_into,
                "the place of the parameter 'weight' of a Embedding": functools.partial(functional, change=torch.neg),
                "as torch.func.functional_call": functools.partial(functional, change=torch.Tensor.detach),
                "an assignment to .data of a sharded parameter would be lost": assigned,
            }
        else:
            wrong |= {
                "does not average this gradient of 'head.weight'": twice,
                "does not average this gradient of": wrapped_but_not_called,
                "outside of no_sync": called_in_no_sync,
                "call optimizer.step() after backward()": steps_in_hooks,
                "of shape (11, 6) of SGD was frozen": thawed,
                "the script has set them itself, as with torch.autograd.grad": own_gradients,
            }
        if strategy == "full_shard":
            with init(strategy) as run:
                functional(run, lambda each: each)
            with init(strategy) as run:
                grad_of_a_penalty(run)
        for words, action in wrong.items():
            with init(strategy) as run:
                refused(words, lambda: action(run))
"""
)


def test_scripts_train_as_in_one_process_or_are_refused(ranks: Ranks) -> None:
    expected = told(ranks(SCRIPT, 1)[0])
    found = told(ranks(SCRIPT, 2)[0])
    assert len(found) == 8
    for key, losses in found.items():
        assert losses == pytest.approx(expected[key.partition(" ")[0]], abs=1e-5), key
