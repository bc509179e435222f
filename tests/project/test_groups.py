"""Tests of one group run in one worker: what they share, as jobs in a cluster, is made once. Others have an order."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.support.collection import spread


@pytest.mark.xdist_group("a group")
def test_the_workers_know_the_groups(request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("this run has no workers")
    assert request.node.nodeid.endswith("@a group")


def test_cluster_tests_begin_when_images_have_been_loaded_and_end_before_the_others() -> None:
    folders = ["cluster"] * 10 + ["unit"] * 100
    order = spread(folders)
    assert sorted(order) == list(range(110))
    positions = [order.index(index) for index in range(10)]
    assert positions == sorted(positions)
    before, after = positions[0], 110 - positions[-1]
    assert before >= 20
    assert after >= 15
    assert max(after - before for before, after in itertools.pairwise(positions)) < 10  # evenly
