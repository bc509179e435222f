"""Models that a script has wrapped, sharded or compiled by itself, in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

# Each rank of tensor parallelism takes the whole batch.
OF_THE_SCRIPT = (
    SMALL_MODEL
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

warnings.simplefilter("ignore")  # FSDP1 calls what torch has deprecated

def wrap(kind):
    model = build()[0]
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def go(kind, steps):
    with init("none", save_every=0, checkpoint=os.environ["BASE"] + "/" + kind) as run:
        model, optimizer = wrap(kind)
        model, optimizer = run.parallelize(model, optimizer)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        run.register("schedule", schedule)
        words = (lambda parts: parts.flatten(0, 1)) if kind == "tp" else (lambda parts: share(run, parts))
        seen = []
        for (part,) in data(6, 1)[run.steps:steps]:
            optimizer.zero_grad()
            loss = loss_of(model, words(part))
            loss.backward()
            if kind in ("ddp", "fsdp2"):
                norm = run.clip_grad_norm(100.0)  # which is far more
                assert type(norm) is torch.Tensor
            optimizer.step()
            schedule.step()
            run.step()
            seen.append(run.mean(loss.item()))
    return seen

with group():
    for kind in os.environ["KINDS"].split():
        tell(kind, go(kind, int(os.environ["STEPS"])))
"""
)


def test_a_model_that_the_script_has_wrapped_is_saved_and_resumes_at_another_world_size(
    ranks: Ranks, tmp_path: Path
) -> None:
    kinds = ("ddp", "fsdp1", "fsdp2", "tp")

    def run(world_size: int, steps: int, kinds: str) -> dict[str, list[float]]:
        names = {"BASE": str(tmp_path), "KINDS": kinds, "STEPS": str(steps)}
        return told(ranks(OF_THE_SCRIPT, world_size, names)[0])

    expected = run(1, 6, "alone")["alone"]
    begun, resumed = run(2, 3, " ".join(kinds)), run(4, 6, " ".join(kinds))
    assert begun.keys() == set(kinds)
    for kind in kinds:
        assert begun[kind] + resumed[kind] == pytest.approx(expected, abs=1e-6), kind


@pytest.mark.soak
def test_torch_compile_is_switched_on_and_off_between_attempts(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        SMALL_MODEL
        + """
warnings.filterwarnings("ignore", "The .grad attribute")  # of the compiler's own looking

def go(name, steps, compiled):
    with init(name, save_every=0, checkpoint=os.environ["BASE"] + "/" + name) as run:
        torch._dynamo.reset()
        model, optimizer = build()
        if compiled == "model":
            model = torch.compile(model, backend="eager")
        if compiled == "blocks":
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block, backend="eager")
        model, optimizer = run.parallelize(model, optimizer)
        return train(run, model, optimizer, steps=steps, first=run.steps)

with group():
    for name in ("full_shard",) if "RANK" in os.environ else ("none",):
        tell(name, go(name, 1, "model") + go(name, 2, "no") + go(name, 3, "blocks") + go(name, 4, "model"))
    if "RANK" not in os.environ:
        with init("none") as run:
            tell("plain", train(run, *build(), steps=4))
"""
    )
    alone, found = (
        told(ranks(script, 1, {"BASE": str(tmp_path)})[0]),
        told(ranks(script, 2, {"BASE": str(tmp_path)})[0]),
    )
    expected = alone["plain"]
    assert len(expected) == 4
    assert alone["none"] == expected
    assert found == {"full_shard": pytest.approx(expected, abs=1e-6)}
