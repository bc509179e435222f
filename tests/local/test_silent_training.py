"""Scripts whose training a strategy might change: each trains as one process does, or is refused by name.

The page "What sharding changes" has what torch itself changes without a word.
"""

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

def read_after_a_forward_pass(run):
    model, optimizer = made(run)
    seen, norms = [], []
    for step in range(3):
        found = loss(run, model, step)
        if run.rank == 0:  # without the other ranks
            for each in (model.norm, model.head):
                norms.append(each.weight.data.norm().item())
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen + norms

def shared_modules(run):
    model = build()[0]
    model.blocks[1].up = model.blocks[0].up
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

def inference_mode_first(run):
    model, optimizer = made(run)
    with torch.inference_mode():
        first = loss(run, model).item()
    return [run.mean(first), *train(run, model, optimizer, steps=3)]

def zero_after_forward(run):
    model, optimizer = made(run)
    seen = []
    for step in range(4):
        found = loss(run, model, step)
        model.zero_grad(set_to_none=step < 2)
        found.backward()
        optimizer.step()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def dropped_in_no_sync(run, **options):
    model, optimizer = made(run, **options)
    seen = []
    for step in range(4):
        with run.no_sync():
            (loss(run, model, step) * 100).backward()
        (model if step < 2 else optimizer).zero_grad()
        seen += train(run, model, optimizer, step + 1, first=step)
    return seen

class Normed(Net):
    def __init__(self):
        super().__init__()
        self.head.max_norm = 1.0  # an attribute of the script's own, which means nothing to torch
        torch.nn.utils.parametrizations.spectral_norm(self.head)

def spectral_norm(run):
    torch.manual_seed(3)
    model = Normed()
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return train(run, model, optimizer, steps=3)

def penalty_before_the_forward_pass(run):
    model, optimizer = made(run)
    seen = []
    for step in range(3):
        penalty = sum(each.square().sum() for each in model.parameters())
        found = loss(run, model, step) + 0.1 * (penalty.full_tensor() if hasattr(penalty, "full_tensor") else penalty)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def combined(run, keep=torch.clone):
    model, optimizer = made(run)
    seen = []
    for step in range(3):
        kept = []
        for number in range(2):
            found = loss(run, model, 2 * step + number)
            found.backward()
            kept.append([keep(each.grad) for each in model.parameters()])
            optimizer.zero_grad()
        for each, one, other in zip(model.parameters(), *kept):
            each.grad = one - 2 * other
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def in_no_sync_after_an_average(run, change=None):
    model, optimizer = made(run)
    loss(run, model).backward()
    with run.no_sync():
        loss(run, model).backward()
    for each in model.parameters() if change else ():
        each.grad = change(each.grad)
    optimizer.step()
    return [run.mean(loss(run, model).item())]

def averaged_by_the_script(run, inside=True):
    model, optimizer = made(run)
    seen = []
    for step in range(3):
        with run.no_sync() if inside else contextlib.nullcontext():
            found = loss(run, model, step)
        with run.no_sync():
            found.backward()
        if inside:
            for each in model.parameters():
                each.grad = flk.all_reduce(each.grad, "mean")
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def averaged_in_place_after_an_average(run):
    return in_no_sync_after_an_average(run, lambda gradient: gradient.copy_(flk.all_reduce(gradient, "mean")))

def logged_by_one_rank(run, rank):
    model = build()[0]
    del model.scale
    model.scale = 1.0  # no buffer, which DDP would send in a call of one rank
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model.blocks, model.head))
    model, _ = run.parallelize(model, [first, second])
    seen = []
    for step in range(4):
        found = loss(run, model, step)
        found.backward()
        for optimizer in (first, second):
            if step > 1 and run.rank == rank:  # DDP has built its buckets anew
                with run.no_sync():
                    loss(run, model)
            optimizer.step()
        if step > 1:
            second.step()  # once more
        for optimizer in (first, second):
            optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def logged_by_rank_0(run):
    return logged_by_one_rank(run, 0)

def logged_by_the_last_rank(run):
    return logged_by_one_rank(run, run.world_size - 1)

def steps_of_rank_0(run):
    model, optimizer = made(run)
    if run.rank == 0:
        optimizer.step()  # as to make its state, or to plan a schedule
    loss(run, model).backward()
    optimizer.step()
    return [run.mean(loss(run, model).item())]

def bounded(run):
    model = build()[0]
    model.embedding.max_norm = 0.5
    run.parallelize(model)

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
    run.step()

def unused(run):
    model = build()[0]
    model.spare = nn.Linear(2, 2)
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss(run, model).backward()
    optimizer.step()

def only_in_no_sync(run):
    model, optimizer = made(run)
    with run.no_sync():
        loss(run, model).backward()
    optimizer.step()

def own_gradients(run):
    model, optimizer = made(run)
    parameters = list(model.parameters())
    for each, gradient in zip(parameters, torch.autograd.grad(loss(run, model), parameters)):
        each.grad = gradient
    optimizer.step()

def left_out(run):
    model, optimizer = made(run)
    with run.no_sync():
        loss(run, model).backward()
    found = loss(run, model)  # with gradients, and without a backward pass, as to log it
    optimizer.step()

def evaluated_in_no_sync(run):
    model, optimizer = made(run)
    found = loss(run, model)
    found.backward()
    with run.no_sync():
        loss(run, model)  # which no backward pass follows
    optimizer.step()
    run.step()
    return [run.mean(loss(run, model).item())]

def first_no_sync_after_a_forward_pass(run):
    model, optimizer = made(run)
    before = loss(run, model, 1)
    with run.no_sync():
        loss(run, model).backward()
    before.backward()
    optimizer.step()
    run.step()
    return [run.mean(loss(run, model).item())]

RIGHT = (
    changed_after_an_evaluation,
    read_after_a_forward_pass,
    shared_modules,
    frozen_in_the_middle,
    inference_mode_first,
    zero_after_forward,
    dropped_in_no_sync,
    spectral_norm,
    penalty_before_the_forward_pass,
    combined,
    evaluated_in_no_sync,
)
UNDER_DDP = (
    averaged_by_the_script,
    averaged_in_place_after_an_average,
    logged_by_rank_0,
    logged_by_the_last_rank,
    steps_of_rank_0,
)
with group():
    if "RANK" not in os.environ:
        with init("none") as run:
            for each in (*RIGHT, *UNDER_DDP, first_no_sync_after_a_forward_pass):
                tell(each.__name__, each(run))
        with init("ddp") as run:
            bounded(run)  # it changes all that it should in one process
    for strategy in ("ddp", "full_shard") if "RANK" in os.environ else ():
        for each in (*RIGHT, *UNDER_DDP) if strategy == "ddp" else (*RIGHT, first_no_sync_after_a_forward_pass):
            with init(strategy) as run:
                tell(f"{each.__name__} {strategy}", each(run))
        wrong = {"has a max_norm": bounded, "in no model of parallelize, has other values": added}
        if strategy == "full_shard":
            wrong |= {
                "the latest backward pass before optimizer.step() was in no_sync": only_in_no_sync,
                "so the step would lack its gradients": in_no_sync_after_an_average,
                "leave the last backward pass before each step out of no_sync": left_out,
                "which precision= adds up apart": lambda run: dropped_in_no_sync(run, precision=flk.Precision()),
            }
        else:
            wrong |= {
                "the ranks train apart: 'embedding.weight' has other values on other ranks": only_in_no_sync,
                "'embedding.weight' has other values": in_no_sync_after_an_average,
                "'spare.weight' has no gradient on this rank: pass find_unused_parameters=True": unused,
                "of shape (11, 6) of SGD was frozen": thawed,
                "has other values on other ranks: give all ranks": own_gradients,
            }
        for words, action in wrong.items():
            with init(strategy) as run:
                refused(words, lambda: (action(run), run.step()))
"""
)


@pytest.mark.promise("Training: What would train wrongly without a word is right or refused by name")
def test_scripts_train_as_in_one_process_or_are_refused(ranks: Ranks) -> None:
    expected = told(ranks(SCRIPT, 1)[0])
    found = told(ranks(SCRIPT, 2)[0])
    assert len(found) == 28
    for key, losses in found.items():
        assert losses == pytest.approx(expected[key.partition(" ")[0]], abs=1e-5), key
