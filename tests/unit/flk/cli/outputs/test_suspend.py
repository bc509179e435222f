"""`flk suspend` of a job whose checkpoints are in its pods, and of one whose checkpoints are in a volume."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from flk import Job
from flk.manifest import render
from flk.manifest.bundle import Bundle
from flk.spec.job import validated
from tests.support.api_server import FakeApiServer
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.promise("Clusters: flk suspend, resume, restart and delete lose no progress unasked")
@pytest.mark.parametrize("fields", [{}, {"checkpoint": "data:/checkpoints"}, {"checkpoint": "s3://runs/gpt"}])
def test_what_happens_to_checkpoints(
    terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, fields: dict[str, Any]
) -> None:
    job: Job = validated({"name": "gpt", "command": ["train.py"], "replicas": 2, **fields})
    fake.add("pytorchjobs", render(job, Bundle())[0])
    assert terminal("flk suspend gpt") == snapshot
    assert terminal("flk suspend gpt") == snapshot
