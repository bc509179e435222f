"""Weights without the rest are loaded into models of any strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

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
"""
)


@pytest.mark.promise("Checkpoints: Torch reads them without flk")
@pytest.mark.filterwarnings("ignore")  # torch's functions warn that they run in one process
def test_weights_of_any_form_are_loaded_under_any_strategy(ranks: Ranks, tmp_path: Path) -> None:
    script = SMALL_MODEL + "torch.save(build()[0].state_dict(), os.environ['FILE'])\n"
    ranks(script, 1, {"FILE": str(tmp_path / "plain.pt")})
    state = torch.load(tmp_path / "plain.pt")
    save_file(state, tmp_path / "one.safetensors")
    torch.save({"model": state, "epoch": 3}, tmp_path / "nested.pt")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    dcp.save({"app": {"model": state, "optim": {"step": 3}}}, checkpoint_id=tmp_path / "app")
    (tmp_path / "hub").mkdir()
    for number, names in enumerate((list(state)[:3], list(state)[3:])):
        save_file({name: state[name] for name in names}, tmp_path / "hub" / f"model-{number}.safetensors")
    expected = told(ranks(BEGIN, 1, {"STRATEGY": "ddp", "PLACE": ""})[0])["losses"]
    script = (
        SMALL_MODEL
        + """
def go_on(steps, which="model"):
    with init("ddp", checkpoint=os.environ["FOLDER"]) as run:
        model, optimizer = run.parallelize(*build())
        judge = run.parallelize(build()[0])
        run.load_weights(place, model=model if which == "model" else judge)
        return train(run, model, optimizer, steps, first=run.steps)

with group():
    for name in ("ddp", "full_shard", "shard_grad_op"):
        for place in os.environ["PLACES"].split(","):
            with init(name) as run:
                model, optimizer = run.parallelize(*build(seed=9))
                run.load_weights(place)
                tell(f"{name} {place}", train(run, model, optimizer, steps=2))
    go_on(2)
    assert go_on(2) == []  # they are for an evaluation
    refused("load_weights has replaced what was restored after step 2", lambda: go_on(3))
    assert len(go_on(3, "judge")) == 1  # no optimizer trains it
"""
    )
    places = [str(tmp_path / name) for name in ("plain.pt", "one.safetensors", "nested.pt", "dcp", "app", "hub")]
    found = told(ranks(script, 2, {"PLACES": ",".join(places), "FOLDER": str(tmp_path / "own")})[0])
    assert len(found) == 18
    for case, losses in found.items():
        assert losses == pytest.approx(expected, abs=1e-6), case
