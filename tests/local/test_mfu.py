"""Model FLOPs utilisation of real ranks: the same count whatever the strategy does to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.collection import often

SCRIPT = """
    import json, os, time
    import torch
    from torch import nn
    import flk_runtime as flk
    from flk_runtime.system import mfu

    mfu.PEAKS = (("cpu", 2, 2, 2, 1),)  # TFLOP/s
    clock = [0.0]
    time.perf_counter = lambda: clock[0]
    options = json.loads(os.environ["OPTIONS"])
    width, rows, layers = 16, 4, 2
    with flk.init(log_every=4) as run:
        block = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        model = nn.Sequential(nn.Linear(width, width), *(block() for _ in range(layers)))
        if options.pop("bf16", False):
            options["precision"] = flk.Precision(param=torch.bfloat16)
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
        assert run.mfu is None
        for step in range(8):
            model(torch.randn(rows, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            clock[0] += 0.25
            run.step()
        # The input needs no gradient, so the first layer has one product less in its backward.
        assert run.flops_per_step == run.world_size * 2 * rows * width * width * (3 * (1 + 2 * layers) - 1)
        peak = 2e12 if "precision" in options else 1e12
        expected = run.flops_per_step / run.world_size / 0.25 / peak
        assert abs(run.mfu / expected - 1) < 1e-9, (run.mfu, expected)
"""


@pytest.mark.parametrize(
    ("strategy", "options"),
    often(
        (2,),
        [
            ("no_shard", "{}"),
            ("full_shard", '{"bf16": true}'),
            ("full_shard", '{"recompute": true}'),
        ],
    ),
)
def test_the_count_is_the_models_under_every_strategy(
    ranks: Callable[..., list[Any]], strategy: str, options: str
) -> None:
    first, second = ranks(SCRIPT, 2, {"FLK_STRATEGY": strategy, "OPTIONS": options})
    assert [line for line in first.lines if '"mfu": ' in line] == first.lines
    assert len(first.lines) == 2
    assert second.lines == []
