"""Loaders that an Accelerator has prepared, and their places in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from flk_runtime.errors import MismatchError
from tests.support.collection import skip_without

skip_without("accelerate")


def prepared(dispatches: bool) -> tuple[Any, Any]:
    """A loader, and what flk keeps of it. ``dispatches``: rank 0 reads the batches of all ranks."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from flk_hosts.accelerate import PreparedLoader

    configuration = DataLoaderConfiguration(dispatch_batches=dispatches)
    loader = Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(list(range(8)), 2))  # type: ignore[arg-type]
    return loader, PreparedLoader(loader)


@pytest.mark.parametrize("dispatches", [True, False])
def test_a_place_of_batches_that_other_ranks_have_read_is_refused_by_name(
    dispatches: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loader, kept = prepared(dispatches)
    next(iter(loader))
    state = kept.state_dict()
    rest, same = prepared(dispatches)
    same.load_state_dict(state)
    left = [[2, 3], [4, 5], [6, 7]]
    assert [batch.tolist() for batch in rest] == ([[0, 1], *left] if dispatches else left)
    assert ("their place is in no checkpoint: epoch 0 begins anew" in capsys.readouterr().err) == dispatches
    with pytest.raises(MismatchError, match=f"saved with dispatch_batches={dispatches}, .* is {not dispatches} now"):
        prepared(not dispatches)[1].load_state_dict(state)
