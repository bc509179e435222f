"""Compiled code in checkpoints: whose code runs, and how much of it is kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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
