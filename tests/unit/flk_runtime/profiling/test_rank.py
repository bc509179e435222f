"""What a profile leaves behind in a rank, with stand-ins for torch's profiler and for the history of CUDA memory."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.profiling.rank import Profile


class Memory:
    """The history of memory: whether it is kept."""

    kept = False

    def _record_memory_history(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.kept = enabled is not None

    def _dump_snapshot(self, path: str) -> None:
        assert self.kept
        Path(path).write_text("")


def profiled(folder: Path) -> tuple[Profile, Any, Memory]:
    """A profile of two steps, the page on which the steps are counted, and the history."""
    page, memory = SimpleNamespace(on_step=None, step=7, step_seconds=0.0), Memory()
    arguments = {"steps": 2, "timeout": 30, "memory": True, "folder": str(folder)}
    profile = Profile(page, arguments)  # type: ignore[arg-type]
    profile._cuda_memory = memory
    done = SimpleNamespace(start=lambda: None, step=lambda: None, stop=lambda: None, export_chrome_trace=lambda _: None)
    profile._profiler = done  # type: ignore[assignment]
    return profile, page, memory


def test_the_history_of_memory_ends_with_a_profile_that_nobody_waits_for(tmp_path: Path) -> None:
    profile, page, memory = profiled(tmp_path)
    profile._after_step()
    profile._after_step()
    assert memory.kept
    own, other = socket.socketpair()
    with own:
        other.close()
        answer = profile.run(own)
    assert answer == {"error": "no steps", "made": 7, "measured": 0, "seconds": 0}
    page.on_step()
    assert page.on_step is None
    assert not memory.kept


@pytest.mark.parametrize("fails", ["in a step", "when it is written", ""])
def test_the_history_of_memory_ends_however_a_profile_ends(fails: str, tmp_path: Path) -> None:
    profile, page, memory = profiled(tmp_path)
    for number in range(4):
        if number == 3:
            assert memory.kept
        if number == 3 and fails == "in a step":
            profile._profiler = None  # type: ignore[assignment]
        profile._after_step()
    assert page.on_step is None
    if fails == "when it is written":
        profile._arguments["folder"] = str(tmp_path / "missing")
    own, other = socket.socketpair()
    with own, other:
        if fails == "when it is written":
            with pytest.raises(FileNotFoundError):
                profile.run(own)
        else:
            assert profile.run(own).keys() >= ({"error", "detail"} if fails else {"files"})
    assert not memory.kept


def test_an_error_of_the_history_is_the_failure_of_the_profile(tmp_path: Path) -> None:
    """And not an error of the training, in whose step it happens."""
    profile, page, _ = profiled(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no history")

    profile._cuda_memory = SimpleNamespace(_record_memory_history=refuse)
    profile._after_step()
    profile._after_step()
    assert page.on_step is None
    own, other = socket.socketpair()
    with own, other:
        assert profile.run(own) == {"error": "failed", "detail": "RuntimeError: no history"}
