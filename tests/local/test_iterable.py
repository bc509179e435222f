"""Iterable data between real processes: torch's, Hugging Face's, and any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.collection import often

STREAMS = """
import itertools
import os
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
import flk_runtime as flk

run = flk.init(device="cpu", strategy="none")
r, W = run.rank, run.world_size

def everywhere(mine):
    every = [None] * W
    dist.all_gather_object(every, mine)
    return every

def seen(loader):
    steps = [batch.tolist() for batch in loader]
    every = everywhere(steps)
    assert len({len(steps) for steps in every}) == 1, every  # all ranks take as many steps
    assert all(every_step for steps in every for every_step in steps)
    return [sorted(itertools.chain.from_iterable(step)) for step in zip(*every)]

class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count
    def __iter__(self):  # splits itself over workers, as torch's documentation shows
        info = get_worker_info()
        return iter(range(info.id if info else 0, self.count, info.num_workers if info else 1))

for count in (W, 3 * W + 1, 40, 41, 47):
    for workers in (0, 2) if count == 47 else (0,):
        # Of its own accord a process of the fork server would start workers that run this script again.
        how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loader = run.loader(Numbers(count), batch_size=4, **how)
        for _ in range(2):
            found = seen(loader)
            assert sorted(sum(found, [])) == list(range(count)), (count, workers, found)
            assert all(step == list(range(4 * W * n, 4 * W * (n + 1))) for n, step in enumerate(found[:-1]))
plain = run.loader((n for n in range(10)), batch_size=2)
assert sorted(sum(seen(plain), [])) == list(range(10))

# One that ends earlier on a rank: all stop together, and what is left over is said
uneven = run.loader(iter(range(70 + 10 * r)), batch_size=2, name="uneven")
assert len(list(uneven)) == 12 and uneven.epoch == 1

# Fewer elements than ranks are an error on all ranks, and none waits
def complains(call):
    try:
        call()
    except flk.SetupError as error:
        print(error)
complains(lambda: list(run.loader(iter(range(W - 1)), batch_size=2, name="few")))
assert flk.all_reduce(1) == W
run.close()
"""


def test_every_element_once_over_ranks_and_workers(ranks: Callable[..., list[Any]]) -> None:
    for rank, one in enumerate(ranks(STREAMS, 3)):
        left_over = (
            "flk: uneven: epoch 0 ends after 72 samples, because a rank has no more data; "
            "2 of 3 ranks have at least 5 samples left over"
        )
        few = "few: epoch 0 of the data has too few samples, 2, for 3 ranks"
        assert one.lines == [*([left_over] if rank == 0 else []), few]


RESUMED = """
import json
import os
import sys
import torch
from torch import nn
import flk_runtime as flk

class Numbers:
    def __iter__(self):
        return iter(range(50))

kind = os.environ["KIND"]
if kind == "numbers":
    data = Numbers()
else:
    import datasets
    data = datasets.Dataset.from_dict({"n": list(range(50))}).to_iterable_dataset(num_shards=int(kind))
    if os.environ.get("SHUFFLE"):
        data = data.shuffle(seed=3, buffer_size=7)
run = flk.init(device="cpu", checkpoint=os.environ["FOLDER"])
model = nn.Linear(1, 1)
model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.0))
workers = int(os.environ.get("WORKERS", "0"))
how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
loader = run.loader(data, batch_size=int(os.environ["BATCH"]), **how)
seen, until = [], int(os.environ["UNTIL"])
for epoch in loader.epochs(2):
    for batch in loader:
        numbers = batch["n"] if isinstance(batch, dict) else batch
        seen += [[epoch, n] for n in numbers.tolist()]
        model(numbers[:, None].float()).sum().backward()
        optimizer.step()
        run.step()
        if run.steps == until:
            run.save()
            break
    if run.steps == until:
        break
sys.stdout.write("seen " + json.dumps(seen) + "\\n")
sys.stdout.flush()
run.close()  # waits until the checkpoint is written
"""


def resumed(
    ranks: Callable[..., list[Any]], folder: Path, worlds: list[tuple[int, int, int]], **environment: str
) -> list[list[int]]:
    """What is seen by worlds of (ranks, batch size, last step) that each resume where the one before stopped."""
    import json

    seen: list[list[int]] = []
    for world_size, batch_size, until in worlds:
        variables = {"FOLDER": str(folder), "BATCH": str(batch_size), "UNTIL": str(until), **environment}
        for one in ranks(RESUMED, world_size, variables):
            seen += json.loads(next(line for line in one.lines if line.startswith("seen ")).removeprefix("seen "))
    return seen


WORLDS = [(2, 4, 2), (3, 3, 4), (1, 2, 5), (2, 4, 1000)]


@pytest.mark.parametrize("workers", often((0,), ["0", "2"]))
def test_it_resumes_at_any_number_of_ranks(ranks: Callable[..., list[Any]], tmp_path: Path, workers: str) -> None:
    seen = resumed(ranks, tmp_path, WORLDS if workers == "0" else WORLDS[::3], KIND="numbers", WORKERS=workers)
    assert sorted(seen) == [[epoch, n] for epoch in range(2) for n in range(50)]


@pytest.mark.parametrize(
    ("shards", "shuffle", "workers"), [("4", "yes", "0"), pytest.param("3", "", "2", marks=pytest.mark.soak)]
)
def test_hugging_face_data_resumes_at_any_number_of_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path, shards: str, shuffle: str, workers: str
) -> None:
    pytest.importorskip("datasets", reason="needs datasets from PyPI")
    variables = {"KIND": shards, "SHUFFLE": shuffle, "WORKERS": workers, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    # Each rank imports datasets. More changes of the number of ranks are in the test above.
    last = (3, 3, 1000) if workers == "0" else WORLDS[-1]
    seen = resumed(ranks, tmp_path, [WORLDS[0], last], **variables)
    assert sorted(seen) == [[epoch, n] for epoch in range(2) for n in range(50)]


HUGGING_FACE = """
import itertools
import datasets
import torch.distributed as dist
import flk_runtime as flk

run = flk.init(device="cpu", strategy="none")
W = run.world_size

def everywhere(mine):
    every = [None] * W
    dist.all_gather_object(every, mine)
    return every

whole = datasets.Dataset.from_dict({"n": list(range(40))})
mapped = run.loader(whole, batch_size=4)  # by index
every = everywhere([n for batch in mapped for n in batch["n"].tolist()])
assert sorted(sum(every, [])) == list(range(40)), every

read = []
def watch(example):
    read.append(example["n"])
    return example
for shards, workers, most in ((4, 0, 20), (4, 2, 20), (3, 0, 40)):
    stream = whole.to_iterable_dataset(num_shards=shards).map(watch)
    how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = run.loader(stream, batch_size=4, **how)
    for epoch in loader.epochs(2):
        read.clear()
        mine = [n for batch in loader for n in batch["n"].tolist()]
        assert workers or len(read) <= most, (shards, len(read))  # shards are read by one rank each where that is even
        every = everywhere(mine)
        assert sorted(sum(every, [])) == list(range(40)), every

# The order of an epoch is its own, also where each rank reads shards of its own.
for shards in (1, 2):
    shuffled = run.loader(whole.to_iterable_dataset(num_shards=shards).shuffle(seed=1, buffer_size=8), batch_size=4)
    orders = [[n for batch in shuffled for n in batch["n"].tolist()] for _ in shuffled.epochs(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0], (shards, orders)

# Shards of 10 and 4: once the shorter one has ended, both ranks take their shares of the other one.
def numbers(sizes):
    for size in sizes:
        for n in range(size):
            yield {"n": n}
sizes = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"sizes": [10, 4]})
uneven = run.loader(sizes, batch_size=4)
steps = [batch["n"].tolist() for batch in uneven]
assert steps == [[0, 1, 2, 3], [4, 6, 8] if run.rank == 0 else [5, 7, 9]], steps
from datasets.distributed import split_dataset_by_node
split = split_dataset_by_node(whole.to_iterable_dataset(num_shards=4), rank=run.rank, world_size=W)
try:
    run.loader(split, batch_size=4)
except flk.SetupError as error:
    print(error)
try:
    run.loader(datasets.DatasetDict({"train": whole}), batch_size=4)
except flk.SetupError as error:
    print(error)

# Interrupted in the rest, and resumed
uneven, mine = run.loader(sizes, batch_size=2), []
for batch in uneven:
    mine += batch["n"].tolist()
    run.step()
    if uneven.consumed == 12:
        break
rest = run.loader(sizes, batch_size=2, name="rest")
state = [uneven.state_dict()]
dist.broadcast_object_list(state, src=0)
rest.load_state_dict(state[0])
mine += [n for batch in rest for n in batch["n"].tolist()]
assert sorted(sum(everywhere(mine), [])) == sorted([*range(10), *range(4)])
run.close()
"""


@pytest.mark.soak
def test_hugging_face_data(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs datasets from PyPI")
    for one in ranks(HUGGING_FACE, 2, {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}):
        assert one.lines == [
            "loader-7: a IterableDataset that splits itself over ranks would be split twice and lose data: pass a "
            "whole dataset, or read this one by torch's DataLoader",
            "a DatasetDict is not a dataset: pass one of its entries ('train')",
        ]


SHARDS = """
import json, os, warnings
from pathlib import Path
import torch.distributed as dist
import flk_runtime as flk

warnings.filterwarnings("ignore", "This DataLoader will create")

class Shards:
    def __init__(self, sizes, chosen=None):
        self.sizes, self.chosen = sizes, list(range(len(sizes))) if chosen is None else chosen
        self.position = 0
    @property
    def num_shards(self):
        return len(self.chosen)
    def shard(self, num_shards, index):
        return Shards(self.sizes, self.chosen[index::num_shards])
    def __iter__(self):
        every = [1000 * shard + n for shard in self.chosen for n in range(self.sizes[shard])]
        for number in every[self.position :]:
            self.position += 1
            yield number
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

run = flk.init(device="cpu", strategy="none")
folder, until = Path(os.environ["FOLDER"]), int(os.environ["UNTIL"])
for workers in (0, 1, 2, 4):
    how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    for sizes in ([9] * 8, [30, 1, 0, 9, 2], [40, 13], [50]):
        name = f"{len(sizes)}-{workers}.json"
        loader, mine = run.loader(Shards(sizes), batch_size=2, name=name, **how), []
        if (folder / name).exists():
            loader.load_state_dict(json.loads((folder / name).read_text()))
        if loader.epoch == 0:
            for _, batch in zip(range(until), loader):
                mine.append(batch.tolist())
                run.step()
        loader.gather()
        every = [None] * run.world_size
        dist.all_gather_object(every, sum(mine, [])) if run.world_size > 1 else every.__setitem__(0, sum(mine, []))
        if run.rank == 0:
            earlier = folder / f"seen-{name}"
            seen = sum(every, json.loads(earlier.read_text()) if earlier.exists() else [])
            earlier.write_text(json.dumps(seen))
            (folder / name).write_text(json.dumps(loader.state_dict()))
            if loader.epoch:
                expected = [1000 * shard + n for shard, size in enumerate(sizes) for n in range(size)]
                assert sorted(set(seen)) == expected, (name, seen)
                assert len(seen) < len(expected) + run.world_size, (name, seen)  # a last step may repeat an element
run.close()
"""


@pytest.mark.soak
@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("second", [1, 2, 3, 4])
def test_shards_are_divided_over_ranks_and_workers(
    ranks: Callable[..., list[Any]], tmp_path: Path, first: int, second: int
) -> None:
    for world_size, until in ((first, 2), (second, 1000)):
        ranks(SHARDS, world_size, {"FOLDER": str(tmp_path), "UNTIL": str(until)})


DIFFERENT = """
import random
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, Subset, TensorDataset
from torch.utils.data import WeightedRandomSampler, random_split
import flk_runtime as flk

run = flk.init(device="cpu", strategy="none")
r, W = run.rank, run.world_size
torch.manual_seed(r), random.seed(r)
data = TensorDataset(torch.arange(40))

def everywhere(batches):
    every = [None] * W
    dist.all_gather_object(every, [number for batch in batches for number in batch.flatten().tolist()])
    return sorted(sum(every, []))

def refused(text, call):
    try:
        call()
    except flk.SetupError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

class Files(IterableDataset):
    def __init__(self, files, own=False):
        self.files, self.own = files, own
    def __iter__(self):
        files = list(self.files)
        (random.Random(r) if self.own else random).shuffle(files)
        return (torch.tensor([10 * file + number]) for file in files for number in range(4))

for kind in (Subset(data, range(r, 40, W)), random_split(data, [30, 10])[0], TensorDataset(torch.randn(40, 2))):
    refused("the ranks have different data: dataset", lambda: run.loader(kind, 4))
numbers = [10 * file + number for file in range(10) for number in range(4)]
assert everywhere(run.loader(Files(range(10)), 4)) == numbers
for stream in (Files(range(r, 10, W)), Files(range(10), own=True)):
    refused("is not the same on all ranks", lambda: list(run.loader(stream, 4)))
orders = [[number for (batch,) in run.loader(data, 4) for number in batch.tolist()] for _ in range(2)]
assert orders[0] != orders[1] and everywhere(batch for (batch,) in run.loader(data, 4, name="third")) == list(range(40))
sampler = WeightedRandomSampler([1.0] * 20 + [0.0] * 20, 30)
found = everywhere(batch for (batch,) in run.loader(data, 4, sampler=sampler))
assert len(found) == 30 and max(found) < 20
batches = [list(range(n, n + size)) for n, size in ((0, 10), (10, 3), (13, 7), (20, 20))]
assert everywhere(batch for (batch,) in run.loader(data, batch_sampler=batches)) == list(range(40))
refused("splits the data over the ranks", lambda: run.loader(data, 4, sampler=DistributedSampler(data)))
own = RandomSampler(data, generator=torch.Generator().manual_seed(r))
refused("gives ranks different orders in epoch 0", lambda: [run.step() for _ in run.loader(data, 4, sampler=own)])
print("done")
run.close()
"""


def test_data_that_ranks_see_differently_are_refused_and_samplers_give_one_order(
    ranks: Callable[..., list[Any]],
) -> None:
    assert all("done" in one.lines for one in ranks(DIFFERENT, 2))
