"""Tests of one group run in one worker: what they share, as jobs in a cluster, is made once."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("a group")
def test_the_workers_know_the_groups(request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("this run has no workers")
    assert request.node.nodeid.endswith("@a group")
