"""GradScaler: a step is that of one process, and an overflow on one rank skips it on all, without extra calls."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

# Six steps of which the third overflows on the last rank. The scale grows after two steps without an overflow.
SCALED = (
    SMALL_MODEL
    + """
def scaled(run, model, optimizer, scaler, *, clip=None, first=0, last=6, zero_grad=None):
    seen = []
    for step, (part,) in list(enumerate(data(6, 1)))[first:last]:
        (zero_grad or optimizer.zero_grad)()
        loss = loss_of(model, share(run, part))
        overflow = step == 2 and run.rank == run.world_size - 1
        scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            seen.append(clip())
        scaler.step(optimizer)
        scaler.update()
        run.step()
        seen.append([run.mean(loss.item()), scaler.get_scale()])
    return seen

def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

def fused(model):  # a GradScaler leaves the scale of gradients to it, where it does not unscale them for clipping
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
"""
)


def test_a_run_scales_as_one_process_does_and_resumes(ranks: Ranks, tmp_path: object) -> None:
    script = (
        SCALED
        + f"""
def go(name, last):
    with init(name, checkpoint={str(tmp_path)!r} + f"/{{name}}-{{os.environ.get('WORLD_SIZE')}}") as run:
        model = build()[0]
        scaler = new_scaler()
        model, optimizer = run.parallelize(model, sgd(model))
        run.register("scaler", scaler)
        clip = lambda: run.clip_grad_norm(0.1).item()
        return scaled(run, model, optimizer, scaler, clip=clip, first=run.steps, last=last)

with group():
    for name in ("ddp", "full_shard") if "RANK" in os.environ else ("none",):
        tell(name, go(name, 4) + go(name, 6))
"""
    )
    expected = told(ranks(script, 1)[0])["none"]
    found = told(ranks(script, 2)[0])
    assert len(found) == 2
    for name, seen in found.items():
        for one, other in zip(seen, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5, nan_ok=True), name
