"""Collectives on trees, between real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REDUCED = """
import collections, dataclasses, enum, json, types
import torch
import flk_runtime as flk

run = flk.init(device="cpu")
r, W = run.rank, run.world_size
Point = collections.namedtuple("Point", "x y")

@dataclasses.dataclass(frozen=True)
class Metrics:
    loss: float
    name: str

class Colour(enum.IntEnum):
    RED = 5

# Containers: of any kind, kept; the given ones stay as they are.
given = {"b": 1.5 * r, "a": [r, (r, None)], "p": Point(r, torch.full((2,), float(r))), "m": Metrics(float(r), "kept")}
tensor = given["p"].y
got = flk.all_reduce(given)
assert list(got) == ["b", "a", "p", "m"] and got["b"] == 4.5 and got["a"] == [3, (3, None)], got
assert got["p"].x == 3 and got["p"].y is tensor and tensor.tolist() == [3.0, 3.0] and type(got["p"]) is Point
assert got["m"] == Metrics(3.0, "kept") and given["b"] == 1.5 * r and given["a"] == [r, (r, None)]
ordered = flk.all_reduce(collections.OrderedDict([("z", r), ("a", 1)]))
assert type(ordered) is collections.OrderedDict and list(ordered) == ["z", "a"] and ordered == {"z": 3, "a": 3}
default = flk.all_reduce(collections.defaultdict(list, n=r))
assert default["n"] == 3 and default["new"] == []
assert flk.all_reduce(types.MappingProxyType({"n": r}))["n"] == 3
backwards = {"x": r, "y": 10 * r} if r else {"y": 10 * r, "x": r}  # the order of keys may differ
assert flk.all_reduce(backwards) == {"x": 3, "y": 30}
assert flk.all_reduce({}) == {} and flk.all_reduce([]) == []

# Numbers
assert flk.all_reduce(r + 1) == 6 and type(flk.all_reduce(r)) is int
assert flk.all_reduce(r, "max") == 2 and flk.all_reduce(r, "min") == 0
assert flk.all_reduce(r, "mean") == 1.0 and type(flk.all_reduce(r, "mean")) is float
assert flk.all_reduce(5, "mean") == 5.0 and flk.all_reduce(0.5, "mean") == 0.5
assert flk.all_reduce(True) == 3 and flk.all_reduce(r == 1, "max") == 1
assert flk.all_reduce([Colour.RED, "text"]) == [Colour.RED, "text"]

# Tensors of every kind
every = {
    "zero_d": torch.tensor(float(r)), "empty": torch.zeros(0, 3), "strided": torch.arange(6.0).view(2, 3).t()[::2],
    "bool": torch.tensor([r == 0, False]), "complex": torch.tensor([1 + 1j * r]),
    "bf16": torch.full((3,), r / 2, dtype=torch.bfloat16),
    "int8": torch.tensor([r], dtype=torch.int8), "int16": torch.tensor([300], dtype=torch.int16),
    "half": torch.ones(2).half(),
    "leaf": torch.full((2,), 1.0, requires_grad=True), "conj": torch.tensor([1 + 1j]).conj(),
}
before = dict(every)
got = flk.all_reduce(every)
assert all(got[name] is before[name] for name in before)
assert got["zero_d"].item() == 3 and got["zero_d"].shape == () and got["empty"].shape == (0, 3)
assert got["strided"].tolist() == [[0.0, 9.0], [6.0, 15.0]]
assert got["bool"].tolist() == [True, False] and got["complex"].tolist() == [3 + 3j]
assert got["conj"].tolist() == [3 - 3j]
assert got["bf16"].tolist() == [1.5] * 3 and got["int8"].item() == 3 and got["int16"].item() == 900
assert got["half"].tolist() == [3, 3] and got["leaf"].tolist() == [3, 3] and got["leaf"].requires_grad
assert flk.all_reduce(torch.tensor([r == 0, True]), "min").tolist() == [False, True]
assert flk.all_reduce(torch.full((2,), 60000.0).half(), "mean").tolist() == [60000.0] * 2  # the sum is beyond float16
assert flk.all_reduce(torch.tensor([1j * r]), "mean").tolist() == [1j]
shared = torch.ones(2)
flk.all_reduce({"tied": shared, "weights": shared})
assert shared.tolist() == [3, 3]  # once

# Many and large leaves: in few messages, in order
from flk_runtime.distributed import collectives
many = [torch.full((1000,), float(i * r), dtype=torch.float64 if i % 3 else torch.float32) for i in range(200)]
collectives.BUCKET_BYTES = 30_000
assert len(collectives.split(many)) > 10
assert all(t.eq(3.0 * i).all() for i, t in enumerate(flk.all_reduce(many)))
large = torch.ones(20_000)
flk.all_reduce([large, large])
assert large.eq(3).all()  # once, though in two buckets it would be
run.close()
print("done")
"""


def test_reductions(ranks: Callable[..., list[Any]]) -> None:
    for one in ranks(REDUCED, 3):
        assert one.lines == ["done"]


DIFFERENT = """
import numpy
import torch
import flk_runtime as flk

run = flk.init(device="cpu")
r = run.rank
cases = [
    lambda: flk.all_reduce({"a": 1, **({"b": 2} if r == 2 else {})}),
    lambda: flk.all_reduce({"w": torch.zeros(3 + (r == 1))}),
    lambda: flk.all_reduce([torch.zeros(2, dtype=torch.float64 if r == 0 else torch.float32)]),
    lambda: flk.all_reduce([1, 2] if r else (1, 2)),
    lambda: flk.all_reduce(1, "mean" if r == 3 else "sum"),
    lambda: flk.synchronize(1) if r == 3 else flk.all_reduce(1),
    lambda: flk.all_reduce([1.0 if r == 0 else 1]),
    lambda: flk.all_reduce({"only": torch.zeros(3, 2).to_sparse() if r == 2 else torch.zeros(3, 2)}),
    lambda: flk.synchronize({"x": torch.zeros(2)} if r < 2 else {"x": None}),
]
for case in cases:
    try:
        case()
    except flk.SetupError as error:
        print(error)
for wrong in (
    lambda: flk.all_reduce(1, "avg"),
    lambda: flk.all_reduce({"n": torch.ones(2, dtype=torch.int64)}, "mean"),
    lambda: flk.all_reduce({"z": [torch.ones(2, dtype=torch.complex64)]}, "max"),
    lambda: flk.all_reduce({"big": 2 ** 64}),
    lambda: flk.all_reduce(torch.zeros(2).to(torch.float8_e4m3fn)),
    lambda: flk.all_reduce(torch.eye(2).to_sparse()),
    lambda: flk.all_reduce(torch.nn.Linear(1, 1)),
    lambda: flk.all_reduce([numpy.zeros(2)]),
    lambda: flk.all_reduce({"at": numpy.float64(1)}),
    lambda: flk.all_reduce(1j),
):
    try:
        wrong()
    except flk.SetupError as error:
        print(error)
print(flk.all_reduce(1))  # and the ranks are still in step
run.close()
"""

DIFFERENCES = [
    "all_reduce(sum): the ranks differ, so nothing was exchanged: "
    "tree['b'] is missing on ranks 0-1, 3, and a number (int) on rank 2",
    "all_reduce(sum): the ranks differ, so nothing was exchanged: "
    "tree['w'] is float32 (3,) on cpu on ranks 0, 2-3, and float32 (4,) on cpu on rank 1",
    "all_reduce(sum): the ranks differ, so nothing was exchanged: "
    "tree[0] is float32 (2,) on cpu on ranks 1-3, and float64 (2,) on cpu on rank 0",
    "tree is a list on ranks 1-3, and a tuple on rank 0",
    "exchanged: the call is all_reduce(sum) on ranks 0-2, and all_reduce(mean) on rank 3",
    "exchanged: the call is all_reduce(sum) on ranks 0-2, and synchronize(root=0) on rank 3",
    "tree[0] is a number (int) on ranks 1-3, and a number (float) on rank 0",
    "tree['only'] is float32 (3, 2) on cpu on ranks 0-1, 3, and float32 (3, 2) on cpu, "
    "sparse or quantized: convert it before on rank 2",
    "tree['x'] is float32 (2,) on cpu on ranks 0-1, and not sent on ranks 2-3",
    "all_reduce: unknown op='avg': expected one of sum, mean, max, min",
    "tree['n'] is int64 (2,) on cpu, cannot average an integer tensor: convert it to floating point",
    "tree['z'][0] is complex64 (2,) on cpu, complex tensors have no max",
    "tree['big'] is a number (int), more than 64 bits: make it a float",
    "tree is float8_e4m3fn (2,) on cpu, dtype not supported by any backend: convert it",
    "sparse or quantized: convert it before",
    "tree is a Linear, use synchronize() for it",
    "tree[0] is a ndarray, pass a tensor, such as torch.as_tensor(…), or a float",
    "tree['at'] is a float64, pass a tensor, such as torch.as_tensor(…), or a float",
    "tree is a complex, pass a tensor, such as torch.as_tensor(…), or a float",
    "4",
]


def test_what_differs_between_ranks_is_named_on_all_of_them(ranks: Callable[..., list[Any]]) -> None:
    for one in ranks(DIFFERENT, 4):
        assert len(one.lines) == len(DIFFERENCES), one.output
        for line, expected in zip(one.lines, DIFFERENCES, strict=True):
            assert line.endswith(expected)


ALONE = """
import torch
import flk_runtime as flk
from torch import nn

for call in (flk.all_reduce, flk.synchronize):
    try:
        call({})
    except flk.SetupError as error:
        print(error)
run = flk.init(device="cpu")
tree = {"t": torch.ones(2), "n": 3, "m": nn.Linear(1, 1), "x": None}
for call in (flk.all_reduce, flk.synchronize):
    assert call(tree) is tree
assert flk.all_reduce(tree, "mean") is tree
for wrong in (lambda: flk.all_reduce(1, "avg"), lambda: flk.synchronize(1, root=1)):
    try:
        wrong()
    except flk.SetupError as error:
        print(error)
run.close()
"""


def test_a_world_of_one_returns_the_given_tree(ranks: Callable[..., list[Any]]) -> None:
    (one,) = ranks(ALONE, 1)
    assert one.lines == [
        *(f"{name} needs the process group: call flk_runtime.init() before" for name in ("all_reduce", "synchronize")),
        "all_reduce: unknown op='avg': expected one of sum, mean, max, min",
        "synchronize: root=1: expected a rank from 0 to 0",
    ]
