"""Which Python runs the launchers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.local.python import interpreter


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_python_on_the_path_is_used_if_it_has_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_torch: bool
) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\nexit {0 if has_torch else 1}\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # flk is installed without torch
    if has_torch:
        assert interpreter()[0] == str(python)
        return
    with pytest.raises(UsageError) as caught:
        interpreter()
    assert str(caught.value) == f"no Python with torch: neither flk's own nor {python} has it"
    assert f"{sys.executable} -m pip install torch, or pipx inject flk torch" in caught.value.hint
