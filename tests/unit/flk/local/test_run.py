"""What `flk run` refuses before a launcher starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.local.run import LocalRun
from flk.spec.job import validated


def test_folders_of_pods_that_cannot_be_made_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flk.local.run.interpreter", lambda: (sys.executable, ""))
    (tmp_path / ".flk").touch()
    job = validated({"command": "train.py", "name": "gpt"})
    with pytest.raises(UsageError) as caught:
        LocalRun(job, tmp_path, b"").run()
    assert str(caught.value) == f"{tmp_path}/.flk/pods/gpt/0 cannot be made (Not a directory)"
    assert caught.value.hint == "--pod-folders needs a folder that you can write"
