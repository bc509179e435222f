"""Which of two checkpoints a run restores."""

from __future__ import annotations

import pytest

from flk_runtime.shared.memory_messages import Restorable


@pytest.mark.parametrize(
    ("step", "doubtful", "preferred"), [(10, False, True), (11, False, True), (9, False, False), (11, True, False)]
)
def test_memory_is_preferred_to_an_older_stored_checkpoint_if_it_could_be_read(
    step: int, doubtful: bool, preferred: bool
) -> None:
    assert Restorable(step, [0], doubtful).is_preferred_to(10) == preferred
