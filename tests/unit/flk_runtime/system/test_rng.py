"""Seeds of the global random generators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flk_runtime.launcher.processes.preload import become_own
from flk_runtime.system import rng


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    state = rng.get_state()
    yield
    rng.set_state(state)


@pytest.mark.parametrize("seed", [0, 7, 42, 2**32 - 1])
def test_a_script_that_seeds_torch_is_known_by_its_seed(seed: int) -> None:
    torch.manual_seed(seed)
    torch.rand(3)
    assert rng.script_seed() == seed


def test_what_torch_begins_a_process_with_is_no_seed_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # other tests of this process may have imported what reads them
    monkeypatch.setenv("LOCAL_RANK", "0")
    torch.default_generator.seed()
    assert rng.script_seed() is None
    torch.manual_seed(7)
    become_own()  # as in a rank that is a fork
    assert rng.script_seed() is None


def test_the_seed_after_a_training_is_known_as_one() -> None:
    seeds = [rng.seed_of_next(seed) for seed in range(20)]
    assert len(set(seeds)) == 20
    for seed in seeds:
        rng.seed_all(seed)
        assert rng.script_seed() == seed
