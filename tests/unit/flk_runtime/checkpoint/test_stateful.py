"""Whose state an object has: every rank its own, or rank 0 for all."""

from __future__ import annotations

from typing import Any

import pytest

from flk_diloco.worker import OuterLoop
from flk_runtime.checkpoint.stateful import is_replicated
from flk_sinks.curves import Curves


@pytest.mark.parametrize("kind", [OuterLoop, Curves])
def test_flks_own_objects_have_one_state_in_the_extensions_too(kind: type) -> None:
    thing: Any = object.__new__(kind)
    assert is_replicated(thing)
