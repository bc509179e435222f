"""Fixtures of the tests that run real processes with gloo on this machine."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.support.ranks import Ranks, start_fork_server


@pytest.fixture(scope="session")
def fork_server() -> ForkServerContext:
    return start_fork_server()


@pytest.fixture
def ranks(fork_server: ForkServerContext, tmp_path: Path) -> Ranks:
    """Runs a script as the ranks of one job: ``ranks(script, world_size)``."""
    return Ranks(fork_server, tmp_path)
