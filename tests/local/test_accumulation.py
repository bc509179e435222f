"""Accumulation, weights of losses and evaluation: equal to one process with the whole batch, under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

# 41 sequences in steps of 12, so an epoch ends with a step of 5. Their labels differ in number; some have none.
# {world size: (batch_size, accumulate)}
WORDS = (
    SMALL_MODEL
    + """
SIZES = {1: (3, 4), 2: (2, 3), 4: (1, 3)}
STEPS = [range(begin, min(begin + 12, 41)) for _ in range(2) for begin in range(0, 41, 12)]
source = torch.Generator().manual_seed(7)
inputs, targets = (torch.randint(0, 11, (41, 9), generator=source) for _ in range(2))
lengths = torch.randint(0, 10, (41,), generator=source)
lengths[::4], lengths[1] = 0, 5
labels = torch.where(torch.arange(9) < lengths[:, None], targets, -100)

class Words(torch.utils.data.Dataset):
    def __init__(self, numbers=range(41)):
        self.numbers = numbers
    def __len__(self):
        return len(self.numbers)
    def __getitem__(self, index):
        number = self.numbers[index]
        return inputs[number], targets[number], labels[number], number

def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

def one_process(steps, tokens, clip=None):
    # Plain torch.
    model, optimizer = build()
    seen = []
    for step in STEPS[:steps]:
        step = list(step)
        optimizer.zero_grad()
        loss = loss_of(model, inputs[step], (labels if tokens else targets)[step])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        seen.append(loss.item())
    return seen

KINDS = (lambda y: (y != -100).sum(), lambda y: int((y != -100).sum()), lambda y: (y != -100).sum().view(1).float())

def accumulate(run, model, optimizer, steps=8, tokens=True, clip=None, size=None, loader=None):
    batch_size, count = size or SIZES[run.world_size]
    loader = loader or run.loader(Words(), batch_size, accumulate=count, shuffle=False)
    seen = []
    for batch in loader.steps(steps):
        losses, weights, samples = [], [], []
        for number, (x, y, some, own) in enumerate(run.micro_batches(batch)):
            loss = loss_of(model, x, some if tokens else y)
            weight = KINDS[number % 3](some) if tokens else None
            run.backward(loss, weight)
            losses.append(loss)
            again = own.tolist() == samples[-1:]  # a rank with one sample for two micro-batches
            weights.append(0 if again else weight if tokens else len(x))
            samples += own.tolist()
        if clip:
            run.clip_grad_norm(clip, model=model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=run.steps % 2 == 0)
        run.step()
        seen.append(run.mean(losses, weights))
    return seen

def strategies(run_size):
    some = {2: ["ddp", "full_shard"], 4: ["hybrid_shard_zero2"]}
    return some.get(run_size, ["none"])
"""
)


@pytest.mark.promise("Training: Gradients are accumulated and weighted as in one process")
def test_accumulated_and_weighted_gradients_are_those_of_one_process_and_resume(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        WORDS
        + f"""
size = int(os.environ.get("WORLD_SIZE", 1))
with group():
    if size == 1:
        for tokens, clip in ((True, None), (True, 0.1), (False, None)):
            tell(f"one {{tokens}} {{clip}}", one_process(8, tokens, clip))
    for name in strategies(size):
        for tokens, clip in ((True, 0.1),) if size == 4 else ((True, 0.1), (False, None)):
            with init(name) as run:
                pair = run.parallelize(*build(), **hybrid(name))
                tell(f"{{name}} {{tokens}} {{clip}}", accumulate(run, *pair, steps=4, tokens=tokens, clip=clip))
    name = "full_shard" if size == 4 else "ddp"
    with init(name, checkpoint={str(tmp_path)!r}) as run:
        first = run.steps
        pair = run.parallelize(*build(), **hybrid(name))
        tell("resumed True None", [None] * first + accumulate(run, *pair, steps=first + 2))
"""
    )
    expected: dict[str, list[float]] = {}
    runs = 0
    for size in (1, 4, 2):
        found = told(ranks(script, size)[0])
        expected |= {key.removeprefix("one "): found.pop(key) for key in list(found) if key.startswith("one ")}
        for key, losses in found.items():
            wanted = expected[key.partition(" ")[2]]
            assert len(losses) == (4 if not key.startswith("resumed") else 2 * (1, 4, 2).index(size) + 2)
            for mine, one in zip(losses, wanted, strict=False):
                assert mine is None or mine == pytest.approx(one, abs=1e-5), (size, key, losses, wanted)
        runs += len(found)
    assert runs == 3 + 2 + 5


@pytest.mark.soak
def test_two_loaders_have_the_shares_that_they_gave(ranks: Ranks) -> None:
    """A step of one has fewer samples than its ranks have to take in full, and other micro-batches."""
    script = (
        WORDS
        + """
B = range(20, 41)

def alone():
    model, optimizer = build()
    seen = []
    for first, second in zip(STEPS, (B[0:6], B[6:12], B[12:18], B[18:])):
        first, second = list(first), list(second)
        optimizer.zero_grad()
        losses = [loss_of(model, inputs[n], targets[n]) for n in (first, second)]
        sum(losses).backward()
        optimizer.step()
        seen.append([each.item() for each in losses])
    return seen

def together(run, wrapped, order, weighted):
    model, optimizer = wrapped
    a = run.loader(Words(), 3, shuffle=False, accumulate=4 // run.world_size)
    b = run.loader(Words(B), 6 // run.world_size, shuffle=False, accumulate=1)
    seen = []
    for pair in zip(a, b):
        found = [None, None]
        for which in order:
            losses, counts = [], []
            for x, y, *_ in run.micro_batches(pair[which]):
                loss = loss_of(model, x, y)
                run.backward(loss, len(x) if weighted else None)
                losses.append(loss), counts.append(len(x))
            found[which] = run.mean(losses, counts)
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        seen.append(found)
    return seen

with group():
    if "RANK" not in os.environ:
        tell("alone", alone())
        with init("ddp") as run:
            model, optimizer = run.parallelize(*build())
            a, b = run.loader(Words(), 3), run.loader(Words(range(8)), 3)
            for _ in zip(a, b):
                run.backward(loss_of(model, inputs[:1], targets[:1]))
    for name in ("ddp", "full_shard"):
        for order in ((0, 1), (1, 0)):
            for weighted in (False, True):
                with init(name) as run:
                    tell(f"{name} {order} {weighted}", together(run, run.parallelize(*build()), order, weighted))
    if "RANK" in os.environ:
        with init("ddp") as run:
            model, optimizer = run.parallelize(*build())
            a, b = run.loader(Words(), 3), run.loader(Words(range(7)), 4)
            for x, y in zip(a, b):
                loss = loss_of(model, x[0], x[1]) + loss_of(model, y[0], y[1])
                refused("(loader 6, loader-1 7)", lambda: run.backward(loss))
                refused("was given a list (Tensor): pass accumulate=1", lambda: next(run.micro_batches(x)))
                run.backward(loss, weight=len(x[0]))
                break
            list(b)  # an evaluation of the old kind: its last batch is not in use
            run.step()
            for x in a:
                run.backward(loss_of(model, x[0], x[1]))
                list(b)
                run.backward(loss_of(model, x[0], x[1]))
                with torch.no_grad():
                    assert len(next(iter(b))[0]) < 5  # an evaluation that is left in a batch of another size
                run.backward(loss_of(model, x[0], x[1]))
                # One that is left in its last batch, of 5, and of which only the computation is without gradients.
                for number, _ in enumerate(run.loader(Words(range(13)), 2)):
                    if number == 2:
                        break
                run.backward(loss_of(model, x[0], x[1]))
                break
"""
    )
    expected = told(ranks(script, 1)[0])
    for size in (1, 2):
        found = told(ranks(script, size)[0]) if size > 1 else expected
        for key, losses in found.items():
            for mine, one in zip(losses, expected["alone"], strict=True):
                assert mine == pytest.approx(one, abs=1e-5), (size, key)


def test_an_evaluation_takes_each_sample_once_also_between_micro_batches(ranks: Ranks) -> None:
    script = (
        WORDS
        + """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.numbers = range(count)
    def __iter__(self):
        return (Words()[number] for number in self.numbers)

def evaluate(run, model, evaluation, passes):
    losses, counts, numbers = [], [], []
    model.eval()
    with torch.no_grad():
        for (x, y, some, own), count in evaluation:
            passes.append(len(x))
            counts.append((some != -100).sum() if count else 0)
            losses.append(loss_of(model, x, some))
            numbers += own.tolist() if count else []
    model.train()
    taken = torch.bincount(torch.tensor(numbers, dtype=torch.int64), minlength=41)
    return run.mean(losses, weight=counts), flk.all_reduce(taken).tolist()

with group():
    for name in ("ddp", "full_shard"):
        with init(name) as run:
            model, optimizer = run.parallelize(*build())
            made = {
                "map": run.evaluation(Words(), 4),
                "few": run.evaluation(Words(range(2)), 4),
                "stream": run.evaluation(Stream(41), 4, num_workers=0),
                "few of a stream": run.evaluation(Stream(3), 4),
            }
            for key, evaluation in made.items():
                for again in range(2):
                    passes = []
                    loss, numbers = evaluate(run, model, evaluation, passes)
                    lengths_of_all = [None] * run.world_size
                    dist.all_gather_object(lengths_of_all, len(passes))
                    assert len(set(lengths_of_all)) == 1, (key, lengths_of_all)
                    tell(f"{name} {key} {again}", [loss, numbers])
            refused("too few samples, 0,", lambda: list(run.evaluation(Stream(0), 4)))
        for interrupted in (False, True):
            with init(name) as run:
                model, optimizer = run.parallelize(*build())
                loader = run.loader(Words(), 1, accumulate=3, shuffle=False)
                evaluation = run.evaluation(Words(range(7)), 4)
                for batch in loader.steps(3):
                    for x, y, some, _ in run.micro_batches(batch):
                        run.backward(loss_of(model, x, some), (some != -100).sum())
                        if interrupted:
                            evaluate(run, model, evaluation, [])
                    optimizer.step()
                    optimizer.zero_grad()
                    run.step()
                tell(f"{name} interrupted {interrupted}", evaluate(run, model, evaluation, [])[0])
if "RANK" not in os.environ:
    model, _ = build()
    with torch.no_grad():
        for key, count in (("map", 41), ("few", 2), ("few of a stream", 3)):
            tell(key, loss_of(model, inputs[:count], labels[:count]).item())
"""
    )
    alone = told(ranks(script, 1)[0])
    expected = dict.fromkeys(("map", "stream"), alone["map"])
    expected |= {key: alone[key] for key in ("few", "few of a stream")}
    for size in (1, 2):
        found = told(ranks(script, size)[0]) if size > 1 else alone
        for name in ("ddp", "full_shard"):
            assert found[f"{name} interrupted True"] == found[f"{name} interrupted False"]
            for again in (0, 1):
                for key, loss in expected.items():
                    count = {"few": 2, "few of a stream": 3}.get(key, 41)
                    mine, numbers = found[f"{name} {key} {again}"]
                    assert numbers == [1] * count + [0] * (41 - count)
                    assert mine == pytest.approx(loss, abs=1e-5)


def test_what_would_weight_wrongly_is_refused(ranks: Ranks) -> None:
    script = (
        WORDS
        + """
def parts_of(run, loader):
    return run.micro_batches(next(iter(loader)))

with group():
    for name in ("ddp", "none"):
        with init(name) as run:
            model, optimizer = run.parallelize(*build())
            loader = run.loader(Words(), 1, accumulate=2)
            def loss():
                return loss_of(model, inputs[:1], targets[:1])
            mean = run.mean([loss(), float("nan")], weight=[1, 0])  # a tensor with a gradient beside a number
            assert abs(mean - loss().item()) < 1e-6
            with run.no_sync():
                refused("in no_sync()", lambda: run.backward(loss(), weight=3))
            for _ in parts_of(run, loader):
                run.backward(loss(), weight=1)
                refused("a second backward for the same micro-batches", lambda: run.backward(loss(), weight=1))
                refused("a second backward for the same micro-batches", lambda: run.backward(loss()))
                refused("end that loop before this one", lambda: next(run.micro_batches(inputs)))
                break
            refused("step after micro-batch 1 of 2", run.step)
            run.step()
            def skips_the_last():
                for number, _ in enumerate(parts_of(run, loader)):
                    if number == 0:
                        run.backward(loss())
            refused("the last micro-batch had no backward pass", skips_the_last)
            list(parts_of(run, loader))
            refused("backward after a loop over micro-batches", lambda: run.backward(loss()))
    with init("none") as run:
        model, optimizer = build()
        with torch.no_grad():
            list(run.loader(Words(range(3)), 1))  # an evaluation, of whose step one rank has more than the other
        own = torch.ones((), requires_grad=True)  # a batch that the script has drawn itself
        run.backward(own)
        assert own.grad == 1
        loader = run.loader(Words(), 1, accumulate=2)
        for _ in parts_of(run, loader):
            refused("needs a model of parallelize", lambda: run.backward(loss_of(model, inputs[:1], targets[:1]), 1))
            break
        model, optimizer = run.parallelize(model, optimizer)
        averaging = flk.DistributedOptimizer(optimizer)
        run.backward(loss_of(model, inputs[:1], targets[:1]) * (1 + run.rank), weight=1 + 2 * run.rank)
        averaging.synchronize()
        found = model.head.weight.grad.clone()
        (once,) = torch.autograd.grad(loss_of(model, inputs[:1], targets[:1]), model.head.weight)
        torch.testing.assert_close(found, once * (1 * 1 + 2 * 3) / 4)
"""
    )
    ranks(script, 2)


@pytest.mark.promise("Training: Gradients are accumulated and weighted as in one process")
def test_weights_with_a_grad_scaler_and_bfloat16(ranks: Ranks) -> None:
    script = (
        WORDS
        + """
with group():
    tell("one", one_process(4, True))
    for name in ("ddp", "full_shard"):
        with init(name) as run:
            model, optimizer = run.parallelize(*build(), precision=flk.Precision())
            tell(f"{name} bf16", accumulate(run, model, optimizer, steps=4))
        with init(name) as run:
            model, optimizer = run.parallelize(*build())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            seen, loader = [], run.loader(Words(), 2, accumulate=3, shuffle=False)
            for batch in loader.steps(4):
                losses, weights = [], []
                for x, y, some, _ in run.micro_batches(batch):
                    loss, weight = loss_of(model, x, some), (some != -100).sum()
                    run.backward(scaler.scale(loss), weight)
                    losses.append(loss)
                    weights.append(weight)
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                run.step()
                seen.append(run.mean(losses, weights))
            tell(f"{name} scaled", seen)
"""
    )
    found = told(ranks(script, 2)[0])
    one = found.pop("one")
    assert len(found) == 4
    for key, losses in found.items():
        assert losses == pytest.approx(one, abs=5e-3 if "bf16" in key else 1e-5), key
