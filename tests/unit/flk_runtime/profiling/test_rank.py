"""What a profile leaves behind in a rank, with a stand-in for torch's profiler."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.profiling.rank import Profile


def profiled(folder: Path) -> tuple[Profile, Any, list[str]]:
    """A profile of two steps, the page on which the steps are counted, and the calls of the profiler."""
    page, calls = SimpleNamespace(on_step=None, step=7), []
    profile = Profile(page, {"steps": 2, "timeout": 30, "folder": str(folder)})  # type: ignore[arg-type]
    names = ("start", "step", "stop", "export_chrome_trace")
    made = {name: lambda *_, name=name: calls.append(name) for name in names}  # type: ignore[misc]
    profile._profiler = SimpleNamespace(**made)  # type: ignore[assignment]
    return profile, page, calls


def test_a_profile_that_nobody_waits_for_ends_after_the_next_step(tmp_path: Path) -> None:
    profile, page, calls = profiled(tmp_path)
    profile._after_step()
    profile._after_step()
    own, other = socket.socketpair()
    with own:
        other.close()
        answer = profile.run(own)
    assert answer == {"error": "no steps", "made": 7, "measured": 0, "seconds": 0}
    page.on_step()
    assert page.on_step is None
    assert calls == ["start", "step", "stop"]


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_in_a_step_ends_the_profile_and_not_the_training(fails: bool, tmp_path: Path) -> None:
    profile, page, _ = profiled(tmp_path)
    for number in range(4):
        if number == 3 and fails:
            profile._profiler = None  # type: ignore[assignment]
        profile._after_step()
    assert page.on_step is None
    own, other = socket.socketpair()
    with own, other:
        assert profile.run(own).keys() == ({"error", "detail"} if fails else {"files"})
