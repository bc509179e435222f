"""What a save waits for before it reads the state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.checkpoint import CheckpointManager, CheckpointOptions
from flk_runtime.system import device


def test_a_save_reads_the_state_when_all_streams_of_the_gpu_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may step on a stream of its own, which the stream of the copy does not wait for."""
    order: list[str] = []

    class Scale:
        def state_dict(self) -> dict[str, Any]:
            order.append("read")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    options = CheckpointOptions(place=None, seed=0, metadata={}, timeout=60.0, needs_model=False)
    manager = CheckpointManager(options, print, print, print)
    manager.register("scale", Scale())
    saver: Any = SimpleNamespace(can_save=True, save=lambda *_, **__: order.append("copied"))
    monkeypatch.setattr(manager, "_saver", saver)
    monkeypatch.setattr(device, "synchronize", lambda: order.append("waited"))
    manager.save(1)
    assert order == ["waited", "read", "copied"]
