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

def changed_after_a_forward_pass(run, change, **options):
    model, optimizer = made(run, **options)
    loss(run, model)  # with gradients, and without a backward pass
    for each in model.parameters():
        change(each)
    optimizer.step()

def halve_data(parameter):
    parameter.data.mul_(0.5)

def halve(parameter):
    with torch.no_grad():
        parameter.mul_(0.5)

def replace_data(parameter):
    parameter.data = parameter.detach() * 0.5

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

class Kept:
    def __init__(self, value):
        self.value = value

class Hiding(Block):  # FSDP2 does not see the tensors in objects
    def forward(self, x):
        return Kept(super().forward(x.value))

class HidingNet(Net):
    def forward(self, x):
        kept = Kept(self.embedding(x))
        for block in self.blocks:
            kept = block(kept)
        return torch.distributions.Categorical(logits=self.head(self.norm(kept.value)))

def hidden_outputs(run, blocks=True):
    model = build()[0]
    model.__class__, model.blocks = HidingNet, nn.ModuleList(Hiding(6) for _ in range(2))
    if not blocks:
        model.blocks = nn.ModuleList([model.blocks[0]])
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5))
    seen = []
    for (part,) in data(6, 1)[:3]:
        words = share(run, part)
        found = -model(words[:, :-1]).log_prob(words[:, 1:]).mean()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def hidden_root(run):
    return hidden_outputs(run, blocks=False)

def loss_as_attribute(run):
    class Losing(nn.Linear):
        def forward(self, x):
            self.loss = super().forward(x).square().mean()

    torch.manual_seed(3)
    model = Losing(4, 4)
    module, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5))
    seen = []
    for _ in range(3):
        module(torch.ones(2, 4))
        model.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(model.loss.item())
    return seen

def inference_mode_first(run):
    model, optimizer = made(run)
    with torch.inference_mode():
        first = loss(run, model).item()
    return [run.mean(first), *train(run, model, optimizer, steps=3)]

class Clamped(Block):
    def forward(self, x):
        with torch.no_grad():
            self.change(self.up)
        return super().forward(x)

def clamp(layer):
    layer.weight.clamp_(-0.1, 0.1)

def clamp_data(layer):  # which torch does not count as a change
    layer.weight.data.clamp_(-0.1, 0.1)

def assign_data(layer):
    layer.weight.data = layer.weight.data / 2

def assign_parameter(layer):
    layer.weight = nn.Parameter(layer.weight / 2)

def clamped(run, change):
    model = build()[0]
    model.blocks = nn.ModuleList(Clamped(6) for _ in range(2))
    Clamped.change = staticmethod(change)
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
    run.step()

def hooked(run, late):
    model = build()[0]
    model = run.parallelize(model) if late else model
    model.head.weight.register_hook(lambda gradient: gradient / 2)
    run.parallelize(model)

def assigned(run):
    model, _ = made(run)
    model.head.weight.data = model.head.weight.data * 2

def rows_of_gradients(run):
    model, optimizer = made(run)
    loss(run, model).backward()
    model.head.weight.grad[1].mul_(0)
    optimizer.step()

def rows_of_weights(run):
    model, optimizer = made(run)
    for step in range(2):
        loss(run, model, step).backward()
        optimizer.step()
        model.head.weight.data[1:3].mul_(0.5)

def rows_are_read(run):
    model, optimizer = made(run)
    loss(run, model).backward()
    model.blocks[0].up.weight[0].square().sum().backward()
    model.head.weight.data[:, 1].mul_(0.5)  # of each row
    model.head.weight.data[1].clone().zero_()
    model.head.weight.grad[1].full_tensor().zero_()  # of the script's own
    weight = model.blocks[0].up.weight.detach()
    weight.mul_(1 + torch.einsum("ij,kj->ik", weight, weight).mean())
    optimizer.step()

def measured(run):
    model, _ = made(run)
    loss(run, model).backward()
    norm = model.head.weight.grad.norm()
    whole = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    assert float(norm.full_tensor()) < whole
    norm.item()

def only_in_no_sync(run):
    model, optimizer = made(run)
    with run.no_sync():
        loss(run, model).backward()
    optimizer.step()

def only_in_no_sync_of_the_last_rank(run):
    model, optimizer = made(run)
    with run.no_sync():
        found = loss(run, model)
        if run.rank == run.world_size - 1:
            found.backward()
    optimizer.step()

def in_no_sync_after_an_average(run, change=None):
    model, optimizer = made(run)
    loss(run, model).backward()
    with run.no_sync():
        loss(run, model).backward()
    for each in model.parameters() if change else ():
        each.grad = change(each.grad)
    optimizer.step()
    return [run.mean(loss(run, model).item())]

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

def averaged_by_ddp_in_no_sync(run):
    return averaged_by_the_script(run, inside=False)

def without_bias(run, bias=None):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run.parallelize(model)
    model(torch.ones(2, 4)).sum().backward()
    model[1].bias = bias
    model(torch.ones(2, 4))

def kept_by_hooks(run):
    model = build()[0]
    kept = []
    model.blocks[0].up.register_forward_hook(lambda module, arguments, output: kept.append(output))
    model = run.parallelize(model)
    loss(run, model)
    kept[0].sum().backward()

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x, which):
        return self.heads[which](self.body(x))

def experts(run):
    model = run.parallelize(Experts())
    model(torch.ones(2, 3), run.rank).sum().backward()

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

def penalty_after_the_forward_pass(run):
    model, _ = made(run)
    (loss(run, model) + sum(each.square().sum() for each in model.parameters())).backward()

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

class Forces(nn.Module):  # by a backward pass inside of the forward pass
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)))

    def forward(self, x, **options):
        x = x.detach().requires_grad_()
        energy = self.layers(x).square().sum()
        return energy, torch.autograd.grad(energy, x, retain_graph=True, **options)[0]

def forces(run, **options):
    torch.manual_seed(3)
    model = Forces()
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for _ in range(3):
        energy, force = model(torch.ones(2, 3), **options)
        (energy + force.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen += [energy.item(), force.sum().item()]
    return seen

class Routed(Block):  # an auxiliary loss that is kept as an attribute
    def __init__(self, width):
        super().__init__(width)
        self.router = nn.Linear(width, 3)

    def forward(self, x):
        y = super().forward(x)
        self.losses = [self.router(x).softmax(-1).square().mean() + self.down.weight.square().mean()]
        return y

def losses_in_blocks(run):
    torch.manual_seed(3)
    model = build()[0]
    model.blocks = nn.ModuleList(Routed(6) for _ in range(3))
    blocks = list(model.blocks)
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5))
    seen = []
    for step in range(3):
        found = loss(run, model, step) + sum(block.losses[0] for block in blocks)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

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

def dropped_passes(run):
    model, optimizer = made(run)
    seen = []
    for step in range(4):
        with run.no_sync():
            loss(run, model, step).backward()
        (optimizer if step % 2 else model).zero_grad()
        found = loss(run, model, step + 1)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(run.mean(found.item()))
    return seen

def drawn_again(run):
    model, optimizer = made(run)
    for each in model.parameters():
        torch.manual_seed(5)
        with torch.no_grad():
            nn.init.normal_(each, std=0.1)
            each.add_(torch.rand_like(each)).mul_(1 + (each > 0).any().float())
    return train(run, model, optimizer, steps=2)

class Normed(Net):
    def __init__(self):
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.head)

def spectral_norm(run):
    torch.manual_seed(3)
    model = Normed()
    model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return train(run, model, optimizer, steps=3)

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

def combined_itself(run):
    return combined(run, keep=lambda each: each)

def combined_view(run):
    return combined(run, keep=torch.detach)

RIGHT = (
    changed_after_an_evaluation,
    read_after_a_forward_pass,
    shared_modules,
    changed_outputs,
    frozen_in_the_middle,
    hidden_outputs,
    hidden_root,
    loss_as_attribute,
    inference_mode_first,
    losses_in_blocks,
    zero_after_forward,
    dropped_passes,
    drawn_again,
    spectral_norm,
    penalty_before_the_forward_pass,
    combined,
    combined_itself,
    combined_view,
)
UNDER_DDP = (
    averaged_by_the_script,
    averaged_by_ddp_in_no_sync,
    averaged_in_place_after_an_average,
    logged_by_rank_0,
    logged_by_the_last_rank,
    steps_of_rank_0,
)
with group():
    if "RANK" not in os.environ:
        with init("none") as run:
            for each in (*RIGHT, *UNDER_DDP, forces):
                tell(each.__name__, each(run))
        with init("ddp") as run:
            bounded(run)  # it changes all that it should in one process
    for strategy in ("ddp", "full_shard") if "RANK" in os.environ else ():
        for each in (*RIGHT, *UNDER_DDP) if strategy == "ddp" else RIGHT:
            with init(strategy) as run:
                tell(f"{each.__name__} {strategy}", each(run))
        wrong = {"has a max_norm": bounded, "in no model of parallelize, has other values": added}
        wrong["'0.weight' of a lazy module has no shape yet"] = lazy
        if strategy == "full_shard":
            wrong |= {
                "Clamped changes its parameter 'up.weight'": functools.partial(clamped, change=clamp),
                "Clamped changes its parameter": functools.partial(clamped, change=clamp_data),
                "changes its parameter 'up.weight'": functools.partial(clamped, change=assign_data),
                "its parameter 'up.weight', which is lost": functools.partial(clamped, change=assign_parameter),
                "changes a part of a sharded tensor": rows_of_gradients,
                "a part of a sharded tensor in place": rows_of_weights,
                "'head.weight' has hooks, which strategy full_shard": functools.partial(hooked, late=False),
                "register_hook of a sharded parameter": functools.partial(hooked, late=True),
                "create_graph=True, as for a gradient penalty": penalized,
                "create_graph=True, as for": functools.partial(forces, create_graph=True),
                "the latest backward pass before optimizer.step() was in no_sync": only_in_no_sync,
                "before optimizer.step() was in no_sync, on this rank or another": in_no_sync_after_an_average,
                "the parameter 'bias' of a Linear has been replaced or removed": without_bias,
                "has been replaced or removed": lambda run: without_bias(run, nn.Parameter(torch.ones(4))),
                "comes from a tensor that the block has not returned": kept_by_hooks,
                "'heads.0.weight' has a gradient on rank 0 and none on rank 1": experts,
                "such as a norm, would give a value of this rank's shards alone": measured,
                "torch.autograd.grad of sharded parameters gives no gradients": grad_of_shards,
                "gives no gradients: call backward()": functools.partial(grad_of_shards, allow_unused=True),
                "computed of sharded parameters themselves": penalty_after_the_forward_pass,
                "backward(inputs=) with sharded parameters gives no gradients": backward_into,
                "the place of the parameter 'weight' of a Embedding": functools.partial(functional, change=torch.neg),
                "as torch.func.functional_call": functools.partial(functional, change=torch.Tensor.detach),
                "an assignment to .data of a sharded parameter would be lost": assigned,
                "an assignment to .data": functools.partial(changed_after_a_forward_pass, change=replace_data),
                "after a forward pass with gradients": functools.partial(changed_after_a_forward_pass, change=halve),
                "changes the parameter": functools.partial(changed_after_a_forward_pass, change=halve_data),
            }
        else:
            wrong |= {
                "does not average this gradient of 'head.weight'": twice,
                "does not average this gradient of": wrapped_but_not_called,
                "outside of no_sync": called_in_no_sync,
                "call optimizer.step() after backward()": steps_in_hooks,
                "the latest backward pass before optimizer.step() was in no_sync": only_in_no_sync,
                "optimizer.step() was in no_sync, on this rank or another": only_in_no_sync_of_the_last_rank,
                "so the ranks have not averaged all gradients: leave the last backward": in_no_sync_after_an_average,
                "out of no_sync, or average them with": lambda run: in_no_sync_after_an_average(run, torch.neg),
                "of shape (11, 6) of SGD was frozen": thawed,
                "the script has set them itself, as with torch.autograd.grad": own_gradients,
            }
        if strategy == "full_shard":  # under ddp, torch.autograd.grad in a forward pass is refused
            with init(strategy) as run:
                tell(f"forces {strategy}", forces(run))
            with init(strategy) as run:
                functional(run, lambda each: each)
            for each in (grad_of_a_penalty, rows_are_read):
                with init(strategy) as run:
                    each(run)
        for words, action in wrong.items():
            with init(strategy) as run:
                refused(words, lambda: action(run))
"""
)


def test_scripts_train_as_in_one_process_or_are_refused(ranks: Ranks) -> None:
    expected = told(ranks(SCRIPT, 1)[0])
    found = told(ranks(SCRIPT, 2)[0])
    assert len(found) == 43
    for key, losses in found.items():
        assert losses == pytest.approx(expected[key.partition(" ")[0]], abs=1e-5), key
