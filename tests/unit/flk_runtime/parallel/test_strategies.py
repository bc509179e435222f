"""Strategies: what a torch that is too old for one is told, before anything else happens, and the mesh of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelModel, ParallelOptions, Precision, parallelize, strategies
from tests.support.old_torch import needs_torch

CURE = "update torch, or use strategy ddp without precision="


def apply(
    strategy: str, options: ParallelOptions, device: str = "cpu", model: nn.Module | None = None
) -> ParallelModel:
    return parallelize(
        model or nn.Linear(2, 2), (), strategy, options, device=torch.device(device), world_size=1, local_world_size=1
    )


@pytest.mark.parametrize(
    ("strategy", "precision", "refused"),
    [
        ("full_shard", None, "strategy full_shard"),
        ("hybrid_shard", Precision(), "strategy hybrid_shard"),
        ("ddp", Precision(), "precision="),
        ("none", Precision(), "precision="),
    ],
)
def test_fsdp2_on_cpus_is_refused_where_torch_has_it_for_gpus_only(
    monkeypatch: pytest.MonkeyPatch, strategy: str, precision: Precision | None, refused: str
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    with pytest.raises(SetupError) as caught:
        apply(strategy, ParallelOptions(precision=precision))
    assert str(caught.value) == f"{refused} on CPUs needs torch 2.7 or newer, and this is torch 2.6.0+cu124: {CURE}"
    apply("ddp", ParallelOptions())
    apply("none", ParallelOptions())


@pytest.mark.parametrize(("version", "device"), [("2.12.0", "cpu"), ("2.6.0", "cuda")])
def test_unused_parameters_of_shards_are_refused_where_torch_cannot_find_them(
    monkeypatch: pytest.MonkeyPatch, version: str, device: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(SetupError) as caught:
        apply("full_shard", ParallelOptions(find_unused_parameters=True), device)
    refused = "strategy full_shard with find_unused_parameters"
    assert str(caught.value) == f"{refused} needs torch 2.13 or newer, and this is torch {version}: {CURE}"


def test_blocks_to_recompute_are_named_by_the_option_of_blocks() -> None:
    with pytest.raises(SetupError, match=r"recompute='Block': expected True or False"):
        apply("ddp", ParallelOptions(recompute="Block"))  # type: ignore[arg-type]


def test_compile_is_refused_where_torch_refuses_it_and_the_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.13 does with Python 3.15, and torch 2.9 with Python 3.14."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("torch.compile is not supported on Python 3.15+")

    model = nn.Sequential(nn.Linear(2, 2))
    options = ParallelOptions(compile="eager", recompute=True, blocks=nn.Linear)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", refuse)
        with pytest.raises(SetupError, match=r"compile= cannot be used: torch \S+ says .*not supported on Python 3.15"):
            apply("none", options, model=model)
    assert "forward" not in vars(model[0])
    apply("none", options, model=model)
    assert "forward" in vars(model[0])


@pytest.mark.parametrize(("given", "said"), [("inductr", "inductr"), ({"mode": "max-autotun"}, "max-autotun")])
def test_a_wrong_option_of_the_compiler_is_told_by_torch(given: Any, said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        apply("none", ParallelOptions(compile=given))
    assert "go together" not in str(caught.value)


@needs_torch((2, 8), "an older one takes no guard_filter_fn")
def test_all_blocks_are_compiled_with_all_options() -> None:
    """torch takes some out of the dictionary that it is given."""
    calls: list[int] = []

    def keep(entries: Any) -> list[bool]:
        calls.append(len(entries))
        return [True] * len(entries)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    options = {"guard_filter_fn": keep}
    given = {"backend": "eager", "options": options}
    apply("none", ParallelOptions(compile=given, blocks=nn.Linear), model=model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert len(calls) == 2
    assert options == {"guard_filter_fn": keep}


def test_the_mesh_of_a_hybrid_strategy_is_made_of_groups_with_all_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The split of a group of gloo and NCCL has NCCL alone before torch 2.8, and torch 2.8 refuses it."""
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: ranks)
    monkeypatch.setattr(DeviceMesh, "from_group", lambda groups, _, mesh, mesh_dim_names: [groups, mesh.tolist()])
    made: Any = strategies._device_mesh(torch.device("cuda", 1), 8, 4)
    assert made == [[[1, 5], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]]
