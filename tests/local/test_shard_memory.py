"""What sharding costs: bytes per rank and collectives per step, to the byte and to the call."""

from __future__ import annotations

import math
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SHARDING, SMALL_MODEL, told

# The shapes of the model's parameters: two blocks, and what is outside of them.
BLOCK = [(6,), (6,), (25, 6), (25,), (6, 25), (6,)]
UNITS = [BLOCK, BLOCK, [(11, 6), (6,), (6,), (11, 6)]]
SHAPES = [shape for unit in UNITS for shape in unit]
BYTES = sum(math.prod(shape) for shape in SHAPES) * 4

SIZES = """
def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def allocated(tensors):
    # Bytes of memory behind the tensors of this rank, each counted once.
    storages = [local(t).untyped_storage() for t in tensors if local(t).numel()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

def exact(tensors):
    return sum(local(t).numel() * t.element_size() for t in tensors)

def sizes(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in parameters if p in optimizer.state]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return {
        "parameters": allocated(parameters), "gradients": allocated(gradients),
        "exp_avg": exact([s["exp_avg"] for s in states]), "exp_avg_sq": exact([s["exp_avg_sq"] for s in states]),
    }
"""

COLLECTIVES = """
from torch.utils._python_dispatch import TorchDispatchMode

class Collectives(TorchDispatchMode):
    # As torch's CommDebugMode counts, without its hooks on modules.
    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::").strip("_").removesuffix("_base")
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))
"""

TRAIN = f"""
with group():
    for name in {SHARDING}:
        with init(name) as run:
            for kind, precision in (("fp32", None), ("bf16", flk.Precision())):
                if kind == "bf16" and name not in ("no_shard", "full_shard"):
                    continue
                model, optimizer = run.parallelize(*build(), precision=precision, **hybrid(name))
                for _ in range(2):  # in these 8 steps the ranks also compare what they use
                    train(run, model, optimizer, steps=4)
                tell(f"{{name}} {{kind}} sizes", sizes(optimizer))
                for accumulation in (1, 4):
                    optimizer.zero_grad()
                    with Collectives() as mode:
                        for number in range(accumulation):
                            with run.no_sync() if number < accumulation - 1 else contextlib.nullcontext():
                                loss_of(model, share(run, data(1, 1)[0][0])).backward()
                    tell(f"{{name}} {{kind}} {{accumulation}}", mode.counts)
"""


@pytest.fixture(scope="module")
def measured(fork_server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks has measured, by strategy, precision and what it is."""
    ranks = Ranks(fork_server, tmp_path_factory.mktemp("measured"))
    return [told(rank) for rank in ranks(SMALL_MODEL + SIZES + COLLECTIVES + TRAIN, 4)]


def shard_size(name: str) -> int:
    """The number of ranks in a shard group, of four ranks."""
    return {"no_shard": 1, "hybrid_shard": 2, "hybrid_shard_zero2": 2}.get(name, 4)


def rank_bytes(rank: int, n: int) -> dict[str, int]:
    """Whole rows, the last ones padded in memory. A rank may hold no row; its gradients have room for one."""
    rows = [(math.ceil(shape[0] / n), shape, math.prod(shape[1:]) * 4) for shape in SHAPES]
    own = [max(0, min(count, shape[0] - rank % n * count)) for count, shape, _ in rows]
    state = sum(here * size for (_, _, size), here in zip(rows, own, strict=True))
    return {
        "parameters": sum(count * size for (count, _, size), here in zip(rows, own, strict=True) if here),
        "gradients": sum(count * size for count, _, size in rows),
        "exp_avg": state,
        "exp_avg_sq": state,
    }


@pytest.mark.promise("Training: Bytes and collectives of a step are those of the page on strategies")
@pytest.mark.xdist_group("what sharding costs")  # both tests look at one run
def test_bytes_per_rank(measured: list[dict[str, Any]]) -> None:
    keys = [key for key in measured[0] if key.endswith("sizes")]
    assert len(keys) == 7
    for key in keys:
        n = shard_size(key.split()[0])
        found = [rank[key] for rank in measured]
        assert found == [rank_bytes(rank, n) for rank in range(4)], key
        assert sum(each["exp_avg"] for each in found) == 4 // n * BYTES, key


@pytest.mark.promise("Training: Bytes and collectives of a step are those of the page on strategies")
@pytest.mark.xdist_group("what sharding costs")
def test_collectives_per_step(measured: list[dict[str, Any]]) -> None:
    keys = [key for key in measured[0] if not key.endswith("sizes")]
    assert len(keys) == 14
    units = len(UNITS)
    expected = {}
    for key in keys:
        name, kind, accumulation = key.split()
        if name == "no_shard":
            expected[key] = (
                {"allreduce": 1, "broadcast": 1} if kind == "fp32" else {"allreduce": units}
            )  # of the buffer
            continue
        # The last block's full parameters are kept for the backward pass where they are freed at all.
        reshards = name in ("full_shard", "hybrid_shard")
        gathers = int(accumulation) * (2 * units - 1) if reshards else units
        expected[key] = {"reduce_scatter": units, "allgather": gathers}
        if name.startswith("hybrid"):
            expected[key]["allreduce"] = units
    assert [{key: rank[key] for key in keys} for rank in measured] == [expected] * 4


@pytest.mark.promise("Training: A model on the meta device starts with its own initial values")
def test_a_meta_start_never_holds_the_whole_model(ranks: Ranks) -> None:
    script = (
        SMALL_MODEL
        + """
peak = number = 0
plain = nn.Linear.reset_parameters

def measured(self):
    global peak, number
    plain(self)
    number += 1
    if number % 8:  # looking at everything takes a while
        return
    local = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta]
    peak = max(peak, sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values()))

nn.Linear.reset_parameters = measured
with group(), init("full_shard") as run:
    with torch.device("meta"):
        model = Net(width=32, blocks=12)
    model.scale = torch.ones(1)
    whole = sum(p.numel() * 4 for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = run.parallelize(model, optimizer, init="reset_parameters")
    tell("peak", peak / whole)
"""
    )
    for rank in ranks(script, 4):
        # A quarter of the blocks before, and one or two blocks of twelve.
        assert 0.2 < told(rank)["peak"] < 0.5
