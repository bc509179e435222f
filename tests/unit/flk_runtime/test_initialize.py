"""What init refuses before the ranks meet."""

from __future__ import annotations

import importlib.util

import pytest

from flk_runtime.errors import SetupError
from flk_runtime.initialize import _require_shipped


@pytest.mark.parametrize("strategy", ["auto", "diloco"])
def test_a_strategy_whose_modules_have_not_travelled_is_refused(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _require_shipped(strategy)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _require_shipped("ddp")
    with pytest.raises(SetupError, match=f"use --strategy {strategy}"):
        _require_shipped(strategy)
