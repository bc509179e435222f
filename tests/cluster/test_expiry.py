"""The TTL of a job: the training operator deletes a job that has succeeded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_faults import SMALL
from tests.support.commands import WITHOUT_TORCH


@pytest.mark.soak
def test_jobs_are_deleted_after_their_ttl(flk: Any, kubectl: Any, image: str, tmp_path: Path, eventually: Any) -> None:
    def submit(name: str, code: str, *more: str) -> Any:
        (tmp_path / "train.py").write_text(code)
        options = [
            "--name",
            name,
            "--replicas",
            "1",
            "--restarts",
            "0",
            "--ttl",
            "3s",
            "--image",
            image,
            *SMALL,
            *WITHOUT_TORCH,
            *more,
        ]
        return flk("submit", "train.py", *options, cwd=tmp_path)

    def left() -> list[str]:
        return sorted(kubectl("get", "pytorchjobs", "-o", "jsonpath={.items[*].metadata.name}").split())

    assert submit("done", "print('done')").code == 0
    assert flk("wait", "done").code == 0
    eventually("the operator deletes the job that has succeeded", lambda: left() == [])
