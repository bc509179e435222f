"""The variables that `flk run` gives its launchers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flk.local.variables import launcher_variables
from flk.spec.job import validated


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "/client"), ("", "/client"), ("/mine", "/client:/mine"), (":/mine", "/client::/mine")],
)
def test_the_runtime_of_the_client_precedes_the_users_module_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    """An entry without a name stays: it is the current folder."""
    job = validated({"command": "train.py", "name": "gpt"})
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    assert launcher_variables(job, tmp_path, tmp_path, (sys.executable, "/client"))["PYTHONPATH"] == expected
