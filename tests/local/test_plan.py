"""What `flk plan` predicts, compared with what ranks do: bytes of model state, and bytes on the wire."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SHARDING, SMALL_MODEL, told

MODELS = """
class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(7, 7, 3), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(203, 10)  # larger than a block, as the head
        layers = (nn.TransformerEncoderLayer(10, 2, 17, batch_first=True, dropout=0.0) for _ in range(3))
        self.encoder = nn.Sequential(*layers)
        self.head = nn.Linear(10, 203)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x))) * 1.0

MAKE = {"net": Net, "pixels": Pixels, "words": Words}
INPUT = {
    "net": lambda: torch.randint(0, 11, (2, 9)), "pixels": lambda: torch.randn(2, 3, 12, 12),
    "words": lambda: torch.randint(0, 13, (2, 9)),
}
LOCAL = {"no_shard": 1, "hybrid_shard": 2, "hybrid_shard_zero2": 2}
"""

PREDICTED = """
from torch._subclasses.fake_tensor import FakeTensorMode
from flk_runtime.parallel.blocks import find_blocks
from flk_plan.hardware import GPUS
from flk_plan.state import model_state, optimizer_sizes, units_of

@functools.cache
def units(kind, precision=None):
    with FakeTensorMode():
        model = MAKE[kind]()
        optimizer = flk.per_rank(torch.optim.AdamW(model.parameters())).thing
        states = optimizer_sizes(optimizer, GPUS["h100"]).states
        return units_of(model, find_blocks(model, None), states, precision)

def chosen(kind, name, precision):
    # Each strategy once, and each model and precision.
    found = {"no_shard": "net", "shard_grad_op": "words", "hybrid_shard": "pixels", "hybrid_shard_zero2": "words"}
    return kind == found.get(name, "net") and bool(precision) == (kind != "net" or name == "full_shard")

def compare(measured, predicted):
    # Tell for each model, strategy and precision what rank 0 measured and predicts.
    for kind, make in MAKE.items():
        for name in strategies:
            precisions = [each for each in (None, flk.Precision()) if everything or chosen(kind, name, each)]
            with init(name) if precisions else contextlib.nullcontext() as run:
                for precision in precisions:
                    torch.manual_seed(0)
                    model = make()
                    model, optimizer = run.parallelize(
                        model, torch.optim.AdamW(model.parameters()), precision=precision, **hybrid(name)
                    )
                    loss = lambda: model(INPUT[kind]()).float().square().mean()
                    found = measured(loss, optimizer)
                    if run.is_main:
                        tell(f"{kind} {name} {bool(precision)}", [found, predicted(kind, name, precision)])
"""

BYTES = """
from torch.utils._python_dispatch import TorchDispatchMode
from flk_plan.communication import collectives

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def allocated(tensors):
    storages = [local(t).untyped_storage() for t in tensors if local(t).numel()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

class Sent(TorchDispatchMode):
    # Bytes that a ring of the group's ranks sends from each rank, for the tensors that are given to collectives.
    total = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name
            groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            n = dist.ProcessGroup.unbox(groups[0]).size()
            size = lambda tree: sum(t.numel() * t.element_size() for t in torch.utils._pytree.tree_leaves(tree)
                                    if isinstance(t, torch.Tensor))
            if "allreduce" in name:
                self.total += 2 * (n - 1) / n * size(args[0])
            elif "allgather" in name:
                self.total += (n - 1) / n * size(args[0])
            elif "reduce_scatter" in name:
                self.total += (n - 1) / n * size(args[1])
            elif "broadcast" not in name:
                raise AssertionError(name)
        return function(*args, **(kwargs or {}))

def measured(loss, optimizer):
    for _ in range(8):  # in which ranks also tell each other which blocks come next and which parameters they use
        loss().backward()
    with Sent() as sent:
        loss().backward()
    optimizer.step()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [t for p in parameters for t in optimizer.state.get(p, {}).values()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    sizes = [allocated(parameters), allocated(gradients), sum(local(t).numel() * t.element_size() for t in tensors)]
    return {"state": sizes, "wire": sent.total}

def predicted(kind, name, precision):
    state = model_state(units(kind), LOCAL.get(name, 4))
    sizes = (precision.param.itemsize, precision.reduce.itemsize) if precision else (None, None)
    wire = sum(c.sent for c in collectives(name, units(kind, precision), 4, LOCAL.get(name, 4), *sizes))
    return {"state": [state.parameters, state.gradients, state.optimizer], "wire": wire}

with group():
    compare(measured, predicted)
"""


@pytest.fixture(scope="module", params=[5, pytest.param(30, marks=pytest.mark.soak)])
def compared(
    fork_server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """What rank 0 of four measured in a step and what it predicts, by model, strategy and precision.

    The soak has all combinations of them.
    """
    ranks = Ranks(fork_server, tmp_path_factory.mktemp("compared"))
    script = SMALL_MODEL + MODELS + f"strategies, everything = {SHARDING!r}, {request.param == 30}\n"
    found = told(ranks(script + PREDICTED + BYTES, 4)[0])
    assert len(found) == request.param
    return found


@pytest.mark.promise("Planning: flk plan predicts the memory and the bytes that ranks measure")
@pytest.mark.xdist_group("bytes of a step")  # both tests look at one run
def test_bytes_of_model_state_are_predicted_exactly(compared: dict[str, Any]) -> None:
    for key, (measured, predicted) in compared.items():
        assert predicted["state"] == measured["state"], key


@pytest.mark.promise("Planning: flk plan predicts the memory and the bytes that ranks measure")
@pytest.mark.xdist_group("bytes of a step")
def test_bytes_on_the_wire_are_predicted_exactly(compared: dict[str, Any]) -> None:
    for key, (measured, predicted) in compared.items():
        assert predicted["wire"] == pytest.approx(measured["wire"]), key


ORACLE = """
import warnings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from flk_runtime.parallel import ParallelOptions
from flk_plan.capture import CapturedModel, _as_trained
from flk_plan.communication import Cluster
from flk_plan.hardware import GPUS
from flk_plan.predict import Workload, predict
from flk_plan.state import optimizer_sizes, units_of
from flk_plan.trace import Tracer

warnings.simplefilter("ignore")  # torch's tracker warns of its own calls
WORDS, BATCH = 2000, (4, 256)

def loss_of(model, words):
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())

def tracked(precision, reshard):
    # The peak that torch's own tracker finds for two steps.
    with FakeTensorMode():
        model, words = Net(words=WORDS, width=256, blocks=6), torch.zeros(BATCH, dtype=torch.int64)
        for block in [*model.blocks, model]:
            policy = MixedPrecisionPolicy()
            if precision:
                output = precision.output if block is model else None
                policy = MixedPrecisionPolicy(precision.param, precision.reduce, output)
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard and block is not model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((words,))
        for step in range(2):
            with tracker:
                loss_of(model, words).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 0:
                tracker.reset_mod_stats()
    return next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]

def planned(precision, name):
    cluster = Cluster(1, 8, GPUS["h100"], 1e9)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model, words = Net(words=WORDS, width=256, blocks=6), torch.zeros(BATCH, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    blocks = list(model.blocks)
    units = units_of(model, blocks, optimizer_sizes(optimizer, cluster.gpu).states, precision)
    captured = CapturedModel(model, [optimizer], ParallelOptions(precision=precision), blocks)
    found = []
    for repeated in (blocks, []):  # with blocks that repeat another one, and all of them run
        tracer = Tracer(model, repeated, cluster.gpu)
        with mode, _as_trained(captured), tracer.recording():
            loss_of(model, words).backward()
        found.append(tracer.result())
    sizes = (2, 4) if precision else (None, None)
    work = Workload(units, found[0], torch.float32, *sizes)
    tell("same", [[each.peak, each.model_flops] for each in found])
    return predict(name, work, cluster).live

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
mesh = init_device_mesh("cpu", (8,))

for precision, name in ((None, "shard_grad_op"), (flk.Precision(), "full_shard")):
    tell(name, [tracked(precision, name == "full_shard"), planned(precision, name)])
"""


@pytest.mark.promise("Planning: flk plan predicts the memory and the bytes that ranks measure")
def test_memory_is_predicted_as_torch_has_it(ranks: Ranks) -> None:
    found = told(ranks(SMALL_MODEL + ORACLE, 1)[0])
    deduplicated, full = found.pop("same")
    assert deduplicated == full
    assert len(found) == 2
    for key, (measured, predicted) in found.items():
        assert predicted == pytest.approx(measured, rel=0.1), key
