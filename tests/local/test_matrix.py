"""Kinds of training, strategies and numbers of ranks: each resumes in the middle at another number of ranks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

STEPS, RESUME = 6, 3
SIZES = [(1, 2), (2, 3), (3, 4), (4, 1)]  # ranks that begin, and ranks that resume
STRATEGIES = ("ddp", "full_shard", "shard_grad_op", "hybrid_shard")
# A kind and how far its losses may be from those of one process.
KINDS = {
    "adamw": 1e-5,
    "several": 1e-5,
    "muon": 1e-4,
    "schedule-free": 1e-5,
    "scaler": 1e-5,
    "bf16": 5e-3,
    "meta": 1e-5,
    "adapter": 1e-5,
}
ORDINARY = [("scaler", "full_shard", 2, 3)]

SCRIPT = (
    SMALL_MODEL
    + """
def optimizers_of(kind, parameters):
    matrices, vectors = ([p for p in parameters if (p.dim() == 2) is wanted] for wanted in (True, False))
    if kind == "several":
        return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(vectors, lr=0.02)]
    if kind == "muon":
        return [torch.optim.Muon(matrices, lr=3e-3), torch.optim.AdamW(vectors, lr=0.01)]
    if kind == "schedule-free":
        import schedulefree
        optimizer = schedulefree.AdamWScheduleFree(parameters, lr=0.01)
        optimizer.train()
        return [optimizer]
    return [torch.optim.AdamW(parameters, lr=0.01)]

class Adapted(nn.Module):  # as LoRA has it
    def __init__(self, base):
        super().__init__()
        self.base, self.inner = base, nn.Linear(6, 2, bias=False)
        self.outer = nn.Linear(2, 25, bias=False)

    def forward(self, x):
        return self.base(x) + self.outer(self.inner(x))

def adapt(model):
    model.requires_grad_(False)
    for each in model.blocks:
        each.up = Adapted(each.up)

def go(kind, strategy, last, folder):
    with init(strategy, checkpoint=folder) as run:
        torch.manual_seed(3)
        with torch.device("meta" if kind == "meta" else "cpu"):
            model = Net()
        if kind == "meta":
            model.scale = torch.ones(1)
        if kind == "adapter":
            adapt(model)
        optimizers = optimizers_of(kind, [each for each in model.parameters() if each.requires_grad])
        model, optimizers = run.parallelize(
            model,
            optimizers,
            init="reset_parameters" if kind == "meta" else None,
            precision=flk.Precision() if kind == "bf16" else None,
            shard_size=2 - run.world_size % 2 if strategy == "hybrid_shard" else None,
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=kind == "scaler")
        run.register("scaler", scaler)
        words, size = torch.randint(0, 11, (6, 12, 9), generator=torch.Generator().manual_seed(5)), 12 // run.world_size
        seen = []
        for step in words[run.steps : last]:
            loss = loss_of(model, step[run.rank * size : (run.rank + 1) * size])
            scaler.scale(loss).backward()
            for each in optimizers:
                scaler.step(each)
                each.zero_grad()
            scaler.update()
            run.step()
            seen.append(run.mean(loss.item()))
        return seen

tell("losses", go(*json.loads(os.environ["CELL"])))
"""
)


def cells() -> list[object]:
    """The cells of the matrix, of which few are in the ordinary suite."""
    found = [(kind, name, *sizes) for kind, name, sizes in itertools.product(KINDS, STRATEGIES, SIZES)]
    return [*ORDINARY, *(pytest.param(*each, marks=pytest.mark.soak) for each in found if each not in ORDINARY)]


@pytest.mark.parametrize(("kind", "strategy", "begin", "resume"), cells())
def test_a_training_that_resumes_at_another_size_is_that_of_one_process(
    ranks: Ranks, tmp_path: Path, kind: str, strategy: str, begin: int, resume: int
) -> None:
    if kind == "schedule-free":
        pytest.importorskip("schedulefree")

    def losses(size: int, name: str, last: int, folder: str) -> list[float]:
        cell = json.dumps([kind, name, last, str(tmp_path / folder)])
        found: list[float] = told(ranks(SCRIPT, size, {"CELL": cell})[0])["losses"]
        return found

    expected = losses(1, "none", STEPS, "alone")
    found = losses(begin, strategy, RESUME, "folder") + losses(resume, strategy, STEPS, "folder")
    assert len(found) == STEPS
    assert found == pytest.approx(expected, abs=KINDS[kind])
