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


# The program of the runtime in a process with torch, whose import takes most of the program's processor time.
PROGRAM = """
import os, sys, warnings
from flk_runtime.__main__ import main

warnings.resetwarnings()
sys.argv[1:] = os.environ["ARGUMENTS"].split("\\n")
main()
"""


def test_export_and_import(ranks: Ranks, tmp_path: Path) -> None:
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
    ranks(PROGRAM, 1, {"ARGUMENTS": f"import\n{tmp_path}/own.safetensors\n{tmp_path}/new"})
    imported = load_with_torch(tmp_path / "new" / "step-000000000")["model"]
    assert all(torch.equal(value, expected[name]) for name, value in imported.items())
    losses = [
        told(ranks(BEGIN, 1, {"STRATEGY": "ddp", "PLACE": place, "WEIGHTS": weights, "SEED": "9"})[0])["losses"]
        for place, weights in (
            (str(tmp_path / "new"), ""),
            (str(tmp_path / "empty"), str(tmp_path / "own.safetensors")),
        )
    ]
    assert losses[0] == losses[1]
    (again,) = ranks(PROGRAM, 1, {"ARGUMENTS": f"import\n{tmp_path}/own.safetensors\n{tmp_path}/run"}, failing=True)
    assert again.code == 2
    assert again.output == f"flk: {tmp_path}/run holds checkpoints already: name another folder\n"


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


def test_torch_save_of_shards_is_refused_by_name(ranks: Ranks) -> None:
    script = (
        SMALL_MODEL
        + """
import copy, io, pickle
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

with group(), init("full_shard") as run:
    model, optimizer = run.parallelize(*build())
    train(run, model, optimizer, steps=1)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    weight = model.state_dict()["head.weight"]
    copied = pickle.loads(pickle.dumps(copy.deepcopy(weight)))  # as it travels to another process
    assert torch.equal(copied.full_tensor(), copy.copy(weight).full_tensor())
    torch.save({"model": whole, "step": run.steps, "shard": weight.to_local()}, io.BytesIO())
    ways = {"pickle_protocol": 2}, {"pickle_protocol": 5}, {"_use_new_zipfile_serialization": False}
    for what in (model.state_dict(), optimizer.state_dict()):
        for way in ways:
            if run.world_size == 1:
                torch.save(what, io.BytesIO(), **way)
            elif run.rank == 0:
                refused("shards of a sharded tensor alone: on all ranks, call run.save(), or run.export(FILE)",
                        lambda: torch.save(what, io.BytesIO(), **way))
    for way in ways:
        refused("cannot pickle Net, a module of FSDP2: on all ranks, call run.save(), or run.export(FILE) for weights",
                lambda: torch.save(model, io.BytesIO(), **way))
    model.__class__ = type("Odd", (type(model),), {})  # as a parametrization does
    assert model.__reduce_ex__(4)[1] == (type(model),)
    refused("cannot pickle Odd, a module of FSDP2", lambda: torch.save(model, io.BytesIO()))
"""
    )
    ranks(script, 2)
    ranks(script, 1)
