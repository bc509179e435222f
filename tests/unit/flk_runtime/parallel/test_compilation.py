"""Compiled code in checkpoints: whose code runs, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor_autograd

from flk_runtime.errors import SetupError
from flk_runtime.parallel import compilation
from flk_runtime.parallel.compilation import CompiledCode

CODE = torch.tensor(list(b"code"), dtype=torch.uint8)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch's compiler is given."""
    given: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", given.append)
    return given


def test_code_of_the_jobs_own_pods_is_used(loaded: list[bytes]) -> None:
    CompiledCode(trusted=True).load_state_dict({"artifacts": CODE})
    assert loaded == [b"code"]


def test_code_from_storage_is_not_used(loaded: list[bytes]) -> None:
    """Whoever can write to the folder could have a pod run it."""
    CompiledCode(trusted=False).load_state_dict({"artifacts": CODE})
    assert loaded == []


@pytest.mark.parametrize(("size", "kept"), [(10, 10), (11, 0)])
def test_code_beyond_the_limit_is_left_out(monkeypatch: pytest.MonkeyPatch, size: int, kept: int) -> None:
    monkeypatch.setattr(compilation, "_LIMIT", 10)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (bytes(size), SimpleNamespace()))
    assert len(CompiledCode(trusted=True).state_dict()["artifacts"]) == kept


def test_a_compiled_part_of_a_model_is_found() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert not compilation.is_compiled(model)
    model[1][0].compile(backend="eager")
    assert compilation.is_compiled(model)
    assert compilation.is_compiled(torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend="eager")))


def test_statistics_that_a_recomputation_would_change_twice_are_refused() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for given in ("eager", {"backend": "eager", "fullgraph": True}):
        with pytest.raises(SetupError, match=r"statistics of a BatchNorm1d twice .* compile='aot_eager'"):
            compilation.check_recomputed([block], given)
    compilation.check_recomputed([block], "aot_eager")
    compilation.check_recomputed([block], True)
    compilation.check_recomputed([block[0], torch.nn.BatchNorm1d(2, track_running_stats=False)], "eager")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _by_method(model: torch.nn.Sequential) -> None:
    model[1].compile(backend="aot_eager")


def _by_function(model: torch.nn.Sequential) -> None:
    model[1] = torch.compile(model[1], backend="aot_eager")


def _forward(model: torch.nn.Sequential) -> None:
    model[1].forward = torch.compile(model[1].forward, backend="aot_eager")


@pytest.mark.filterwarnings("ignore")  # of the compiler's own looking
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compiles", [None, _by_method, _by_function, _forward])
def test_a_compiled_block_gives_gradients_to_a_result_of_a_collective_that_is_not_there_yet(
    compiles: Callable[[torch.nn.Sequential], None] | None,
) -> None:
    """A block that flk compiles (None), and one that a script has compiled in one of these ways."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), block)
        if compiled and compiles:
            compiles(model)
            compilation.wait_before_compiled(model)
        elif compiled:
            compilation.compile_module(block, "aot_eager")
        gathered = all_gather_tensor_autograd(model[0](torch.ones(2, 4)), 0, dist.group.WORLD).view(2, 4)
        assert isinstance(gathered, AsyncCollectiveTensor)
        model[1](gathered).square().sum().backward()
        found.append(model[0].weight.grad)
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
