"""Frozen parameters that checkpoints leave out: LoRA on a frozen base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import load_with_torch
from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

LORA = (
    SMALL_MODEL
    + """
class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

def adapt(seed=3):
    model = build(seed=seed)[0].requires_grad_(False)
    for block in model.blocks:
        block.up = LoRA(block.up)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)

def go(place, strategy, steps, seed=3, save_frozen=False):
    with init(strategy, save_every=0, checkpoint=f"{os.environ['BASE']}/{place}") as run:
        shard_size = {"shard_size": 2} if strategy.startswith("hybrid") and run.world_size > 1 else {}
        model, optimizer = run.parallelize(*adapt(seed), save_frozen=save_frozen, **shard_size)
        return train(run, model, optimizer, steps=steps, first=run.steps)
"""
)


def test_a_frozen_base_is_not_saved_and_the_run_resumes(ranks: Ranks, tmp_path: Path) -> None:
    """At another number of ranks, with another strategy, and from a checkpoint that has the base."""

    def run(world_size: int, cases: list[tuple[str, str, int, bool]]) -> dict[str, list[float]]:
        script = f"""
with group():
    for place, strategy, steps, saves in {cases}:
        tell(place, go(place, strategy, steps, save_frozen=saves))
"""
        return told(ranks(LORA + script, world_size, {"BASE": str(tmp_path)})[0])

    expected = run(1, [("whole", "none", 6, True)])["whole"]
    parts = [
        run(1, [("first", "none", 2, False), ("second", "none", 2, True), ("third", "none", 2, True)]),
        run(4, [("first", "hybrid_shard", 4, False), ("second", "full_shard", 4, False), ("third", "ddp", 4, True)]),
        run(2, [("first", "full_shard", 6, False), ("second", "ddp", 6, False), ("third", "full_shard", 6, False)]),
    ]
    for place in ("first", "second", "third"):
        found = [loss for part in parts for loss in part[place]]
        assert found == pytest.approx(expected, abs=1e-6), place
    for place, step in (("first", 4), ("first", 6), ("second", 4), ("third", 6)):
        saved = load_with_torch(tmp_path / place / f"step-{step:09d}")["model"]
        adapters = {f"blocks.{number}.up.{part}.weight" for number in range(2) for part in ("down", "up")}
        assert saved.keys() == adapters | {"scale"}


def test_another_base_and_a_changed_one_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        LORA
        + """
with group():
    for name in ("ddp", "full_shard"):
        go(name, name, 2)
        words = "'blocks.0.down.bias' has other values here, and the checkpoint does not have it because it was frozen"
        refused(words, lambda: go(name, name, 4, seed=4))
        refused("missing key 'embedding.weight'", lambda: go(name, name, 4, save_frozen=True))
        with init(name, checkpoint=f"{os.environ['BASE']}/{name}-changed", save_every=0) as run:
            model, optimizer = run.parallelize(*adapt(), save_frozen=False)
            train(run, model, optimizer, steps=2)
            run.save(wait=True)
            head = getattr(model, "module", model).head.weight
            head.requires_grad_()
            refused("'head.weight' requires a gradient, and checkpoints leave it out", run.save)
            head.requires_grad_(False)
            run.save(wait=True)
            with torch.no_grad():
                head.mul_(2)
            refused("'head.weight' has been changed, and checkpoints leave it out", run.save)
            run.abandon()
"""
    )
    ranks(script, 2, {"BASE": str(tmp_path)})
