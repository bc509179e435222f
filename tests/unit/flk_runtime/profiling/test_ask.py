"""Which rank the program asks that `flk profile` runs beside it."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.profiling import ask


def test_the_rank_of_the_newest_attempt_is_asked_also_while_folders_of_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher removes the folder of an attempt when the next one starts."""
    tmp_path /= "tmp[1]"  # which is no pattern
    tmp_path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    listeners = []
    for number in (2, 9, 10):
        folder = tmp_path / "flk-1" / f"attempt_{number}" / "0"
        folder.mkdir(parents=True)
        listeners.append(socket.socket(socket.AF_UNIX))
        monkeypatch.chdir(folder)
        listeners[-1].bind("observer.socket")
        listeners[-1].listen()

    def meanwhile(found: Iterable[Any], **how: Any) -> list[Any]:
        every = list(found)
        shutil.rmtree(tmp_path / "flk-1" / "attempt_2", ignore_errors=True)
        return sorted(every, **how)

    monkeypatch.setattr(ask, "sorted", meanwhile, raising=False)
    connection = ask._connected({"folders": "flk-*", "local_rank": 0})
    assert connection is not None
    with connection, listeners[-1]:
        listeners[-1].settimeout(30)
        listeners[-1].accept()[0].close()
    for each in listeners:
        each.close()
