"""Checkpoints of sharded models: from any strategy and world size to any other, and as torch itself reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import load_with_torch
from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

CASES = [
    ("ddp", "fsdp2"), ("full_shard", "fsdp2"), ("full_shard", "fsdp1"), ("shard_grad_op", "fsdp1"),
    ("hybrid_shard", "fsdp2"), ("hybrid_shard_zero2", "fsdp1"), ("no_shard", "fsdp1"),
]  # fmt: skip

# A run of at most 6 steps that saves at its end, in a folder under $BASE.
GO = (
    SMALL_MODEL
    + """
base = os.environ["BASE"]

def go(folder, name, api, steps, precision=None):
    with init(name, save_every=0, checkpoint=f"{base}/{folder}") as run:
        size = min(2, run.world_size)
        options = {"shard_size": size} if name.startswith("hybrid") else {}
        pair = run.parallelize(*build(), api=None if name == "ddp" else api, precision=precision, **options)
        return train(run, *pair, steps=steps, first=run.steps)
"""
)


@pytest.fixture
def undisturbed(ranks: Ranks, tmp_path: Path) -> list[float]:
    """The losses of six steps of strategy ddp on four ranks."""
    script = GO + 'with group():\n    tell("losses", go("ddp", "ddp", None, 6))\n'
    losses: list[float] = told(ranks(script, 4, {"BASE": str(tmp_path)})[0])["losses"]
    return losses


def objects(folder: Path) -> dict[str, Any]:
    return load_with_torch(folder / "step-000000006")


def test_a_resumed_run_ends_bit_equal_under_every_strategy(
    ranks: Ranks, tmp_path: Path, undisturbed: list[float]
) -> None:
    script = (
        GO
        + f"""
with group():
    for name, api in {CASES}:
        case = f"{{name}}-{{api}}"
        tell(case, [go(case + "-whole", name, api, 6), go(case, name, api, 3) + go(case, name, api, 6)])
"""
    )
    found = told(ranks(script, 4, {"BASE": str(tmp_path)})[0])
    assert found.keys() == {f"{name}-{api}" for name, api in CASES}
    for case, (whole, resumed) in found.items():
        assert whole == resumed, case
        assert whole == pytest.approx(undisturbed, abs=1e-6), case
        one, other = objects(tmp_path / case), objects(tmp_path / f"{case}-whole")
        assert one["model"].keys() == other["model"].keys()
        assert all(torch.equal(value, other["model"][key]) for key, value in one["model"].items()), case
        assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
        for name, state in one["optimizer"]["state"].items():
            for key, value in state.items():
                expected = other["optimizer"]["state"][name][key]
                assert torch.equal(value, expected), (case, name, key, value, expected)


def test_torch_reads_full_tensors_by_the_models_own_names(ranks: Ranks, tmp_path: Path) -> None:
    script = (
        GO
        + f"""
with group():
    for name, api in {CASES}:
        go(f"{{name}}-{{api}}", name, api, 6)
    go("low", "full_shard", "fsdp2", 6, flk.Precision())
    tell("shapes", {{name: list(value.shape) for name, value in build()[0].state_dict().items()}})
"""
    )
    shapes = told(ranks(script, 4, {"BASE": str(tmp_path)})[0])["shapes"]
    for folder in [*(f"{name}-{api}" for name, api in CASES), "low"]:
        content = objects(tmp_path / folder)
        assert {name: list(value.shape) for name, value in content["model"].items()} == shapes, folder
        assert {value.dtype for value in content["model"].values()} == {torch.float32}, folder  # the master weights
        averages = [list(state["exp_avg"].shape) for state in content["optimizer"]["state"].values()]
        trained = [shape for name, shape in shapes.items() if name != "scale"]
        assert sorted(averages) == sorted(trained), folder


def test_resume_under_another_strategy(ranks: Ranks, tmp_path: Path, undisturbed: list[float]) -> None:
    script = (
        GO
        + f"""
with group():
    for (name, api), (other, other_api) in zip({CASES}, {CASES[3:] + CASES[:3]}):
        go(f"{{name}}-{{api}}", name, api, 3)
        tell(f"{{name}} {{api}} to {{other}} {{other_api}}", go(f"{{name}}-{{api}}", other, other_api, 6))
"""
    )
    found = told(ranks(script, 4, {"BASE": str(tmp_path)})[0])
    assert len(found) == len(CASES)
    assert all(losses == pytest.approx(undisturbed[3:], abs=1e-6) for losses in found.values()), found


def test_resume_at_another_world_size(ranks: Ranks, tmp_path: Path, undisturbed: list[float]) -> None:
    cases = (("full_shard", "fsdp2"), ("hybrid_shard_zero2", "fsdp1"), ("shard_grad_op", "fsdp1"))
    four = GO + f"with group():\n    for name, api in {cases}:\n        go(name, name, api, 3)\n"
    two = (
        GO
        + f"""
with group():
    for name, api in {cases}:
        tell(name, go(name, "full_shard", "fsdp1" if api == "fsdp2" else "fsdp2", 6))
"""
    )
    ranks(four, 4, {"BASE": str(tmp_path)})
    found = told(ranks(two, 2, {"BASE": str(tmp_path)})[0])
    assert len(found) == 3
    assert all(losses == pytest.approx(undisturbed[3:], abs=1e-6) for losses in found.values()), found
