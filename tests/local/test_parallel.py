from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import Ranks

TRAIN = """
    import json, torch, flk_runtime as flk
    with flk.init(device="cpu", seed=1, log_every=0) as run:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        wrapped, optimizer = run.parallelize(model, optimizer)
        numbers = torch.Generator().manual_seed(2)
        x = torch.randn(48, 8, generator=numbers)
        loader = run.loader(torch.utils.data.TensorDataset(x, x[:, :1] * x[:, 1:2]), 12 // run.world_size)
        for _ in loader.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
                run.step()
        print(json.dumps([run.steps, *torch.cat([p.flatten() for p in model.parameters()]).tolist()]))
"""


def test_none_leaves_communication_to_the_user(ranks: Ranks) -> None:
    (alone,) = ranks(TRAIN, 1)
    first, second = ranks(TRAIN, 2, {"FLK_STRATEGY": "none"})
    assert first.output != second.output
    assert json.loads(first.output) != pytest.approx(json.loads(alone.output), abs=1e-3)


def test_a_model_that_is_not_trained_has_the_weights_of_rank_0_and_is_not_trained_later(ranks: Ranks) -> None:
    script = """
        import os, torch, flk_runtime as flk
        with flk.init(device="cpu") as run:
            torch.manual_seed(int(os.environ["RANK"]))
            reference = run.parallelize(torch.nn.Linear(2, 1).requires_grad_(False))
            run.parallelize(torch.nn.ReLU())
            print(reference(torch.ones(1, 2)).item())
            reference.requires_grad_(True)
            reference(torch.ones(1, 2)).sum().backward()
            optimizer = torch.optim.SGD(reference.parameters(), 0.1)
            optimizer.step()  # the run has not been given it
            run.register("optimizer", optimizer)
            try:
                optimizer.step()
            except flk.SetupError as error:
                print(error)
        optimizer.step()
    """
    first, second = ranks(script, 2)
    assert first.output == second.output
    assert "was frozen in parallelize" in first.output or "was frozen or absent in" in first.output


# Each layer is as large as DDP's first bucket. They run in another order than that in which they are registered.
BUCKETS = """
import os, warnings, torch, torch.distributed as dist, flk_runtime as flk
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
    def forward(self, x):
        for number in (2, 0, 3, 1):
            x = self.layers[number](x).tanh()
        return x

def steps(model, optimizer, first, last, after=lambda: None):
    # the buckets of each step: the indices of their parameters
    indices = {id(p): number for number, p in enumerate(model.parameters())}
    def hook(seen, bucket):
        seen[-1].append([indices[id(p)] for p in bucket.parameters()])
        sums = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return sums.then(lambda done: done.value()[0] / dist.get_world_size())
    seen = []
    model.register_comm_hook(seen, hook)
    for step in range(first, last):
        seen.append([])
        optimizer.zero_grad()
        x = torch.randn(2, 512, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        after()
    return seen

def build():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

def go(folder, last, find_unused=False):
    place = os.environ["BASE"] + folder
    with flk.init(strategy="ddp", device="cpu", log_every=0, save_every=0, checkpoint=place) as run:
        model, optimizer = run.parallelize(*build(), find_unused_parameters=find_unused)
        seen = steps(model, optimizer, run.steps, last, run.step)
        return seen, torch.cat([p.detach().flatten() for p in model.parameters()])

dist.init_process_group("gloo")
whole, values = go("whole", 4)
assert whole == whole[:1] * 4 and len(whole[0]) > 1, whole
begun, _ = go("resumed", 1)
resumed, again = go("resumed", 4)
assert begun + resumed == whole, (begun, resumed)
assert torch.equal(values, again)
fixed = go("unused", 1, find_unused=True)[0]  # torch keeps the buckets if there may be unused parameters
assert go("unused", 3, find_unused=True)[0] == fixed * 2

def sparse(folder, last):
    place = os.environ["BASE"] + folder
    with flk.init(strategy="ddp", device="cpu", log_every=0, save_every=0, checkpoint=place) as run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(9, 512, sparse=True), *(nn.Linear(512, 512) for _ in range(3)))
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        while run.steps < last:
            words = torch.randint(9, (2, 4), generator=torch.Generator().manual_seed(10 * run.steps + run.rank))
            optimizer.zero_grad()
            model(words).square().mean().backward()
            optimizer.step()
            run.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

values = sparse("sparse", 4)
sparse("sparse resumed", 1)
assert torch.equal(sparse("sparse resumed", 4), values)
dist.destroy_process_group()
"""


def test_buckets_stay_the_same_also_after_a_restart(ranks: Ranks, tmp_path: Path) -> None:
    ranks(BUCKETS, 3, {"BASE": f"{tmp_path}/"})


def test_a_sharded_model_may_hold_tensors_of_any_dtype_and_its_norms_are_printed(ranks: Ranks) -> None:
    script = """
        import os, torch, flk_runtime as flk
        with flk.init(device="cpu", strategy="full_shard", log_every=1) as run:
            model = torch.nn.Linear(4, 1)
            for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool):
                model.register_buffer(str(dtype)[6:], torch.full((3,), 1 - run.rank).to(dtype))
            model.register_buffer("expanded", torch.full((1, 2), 1.0 - run.rank).expand(3, 2))
            model.frozen = torch.nn.Parameter(torch.ones(()).to(torch.float8_e4m3fn).reshape(1), requires_grad=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = run.parallelize(model, optimizer)
            assert all(buffer.float().eq(1).all() for name, buffer in model.named_buffers() if name != "complex64")
            model(torch.ones(2, 4)).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert run.mean(norm) == norm.item()
            run.step(norm=norm, norms={"of": [norm]})
            run.log(weight=model.weight)
    """
    first, _ = ranks(script, 2)
    step, logged = map(json.loads, first.lines)
    assert step["norm"] == pytest.approx(20**0.5)
    assert step["norms"] == {"of": [step["norm"]]}
    assert len(logged["weight"]) == 4


def test_two_forward_passes_before_a_backward_pass_send_buffers_each(ranks: Ranks) -> None:
    """Sending them is no change that autograd has to know: the first pass has kept them for its backward pass."""
    script = """
        import torch, flk_runtime as flk
        with flk.init(device="cpu", strategy="full_shard") as run:
            model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
            model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(2):
                values = torch.arange(12.0).view(3, 4) * (1 + run.rank)
                (model(values) * model(values.flip(0))).sum().backward()
                optimizer.step()
                run.step()
            assert run.steps == 2
    """
    ranks(script, 2)
