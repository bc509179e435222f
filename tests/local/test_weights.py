"""Weights without the rest: export and import of one safetensors file, and loading into models of any strategy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import load_with_torch
from tests.support.ranks import Ranks
from tests.support.small_model import SMALL_MODEL, told

BEGIN = (
    SMALL_MODEL
    + """
with init(os.environ["STRATEGY"], checkpoint=os.environ["PLACE"]) as run:
    model, optimizer = run.parallelize(*build(seed=int(os.environ.get("SEED", 3))))
    if os.environ.get("WEIGHTS"):
        run.load_weights(os.environ["WEIGHTS"])
    losses = train(run, model, optimizer, steps=2)
    tell("losses", losses)
    if os.environ.get("EXPORT"):
        run.export(os.environ["EXPORT"])
"""
)


def test_export(ranks: Ranks, tmp_path: Path) -> None:
    variables = {"STRATEGY": "full_shard", "PLACE": str(tmp_path / "run"), "EXPORT": str(tmp_path / "own.safetensors")}
    ranks(BEGIN, 2, variables)
    expected = load_with_torch(tmp_path / "run" / "step-000000002")["model"]
    command = [sys.executable, "-m", "flk_runtime", "export", str(tmp_path / "run"), f"{tmp_path}/offline.safetensors"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{len(expected)} tensors in {tmp_path}/offline.safetensors\n"
    for file in ("own", "offline"):
        found = load_file(tmp_path / f"{file}.safetensors")  # by the format's own package
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.filterwarnings("ignore")  # torch's functions warn that they run in one process
def test_weights_of_any_form_are_loaded_under_any_strategy(ranks: Ranks, tmp_path: Path) -> None:
    script = SMALL_MODEL + "torch.save(build()[0].state_dict(), os.environ['FILE'])\n"
    ranks(script, 1, {"FILE": str(tmp_path / "plain.pt")})
    state = torch.load(tmp_path / "plain.pt")
    save_file(state, tmp_path / "one.safetensors")
    torch.save({"model": state, "epoch": 3}, tmp_path / "nested.pt")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "hub").mkdir()
    for number, names in enumerate((list(state)[:3], list(state)[3:])):
        save_file({name: state[name] for name in names}, tmp_path / "hub" / f"model-{number}.safetensors")
    expected = told(ranks(BEGIN, 1, {"STRATEGY": "ddp", "PLACE": ""})[0])["losses"]
    script = (
        SMALL_MODEL
        + """
with group():
    for name in ("ddp", "full_shard", "shard_grad_op"):
        for place in os.environ["PLACES"].split(","):
            with init(name) as run:
                model, optimizer = run.parallelize(*build(seed=9))
                run.load_weights(place)
                tell(f"{name} {place}", train(run, model, optimizer, steps=2))
"""
    )
    places = [str(tmp_path / name) for name in ("plain.pt", "one.safetensors", "nested.pt", "dcp", "hub")]
    found = told(ranks(script, 2, {"PLACES": ",".join(places)})[0])
    assert len(found) == 15
    for case, losses in found.items():
        assert losses == pytest.approx(expected, abs=1e-6), case
