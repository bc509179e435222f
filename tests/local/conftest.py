"""Fixtures of the tests that run real processes with gloo on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.support.fork_server import start_fork_server
from tests.support.old_torch import outputs, refusal
from tests.support.pods import TRAIN, Pods
from tests.support.ports import held_ports
from tests.support.ranks import Ranks


@contextlib.contextmanager
def skipped_if_too_old(item: pytest.Function) -> Iterator[None]:
    """Skip a test that fails since this torch is too old for what it tests, with the line that refuses it."""
    try:
        yield
    except Exception as error:
        folder = item.funcargs.get("tmp_path")
        if line := refusal([str(error), *(outputs(folder) if folder else ())]):
            pytest.skip(line)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Function) -> Iterator[None]:
    with skipped_if_too_old(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    with skipped_if_too_old(item):
        yield


@pytest.fixture(scope="session")
def fork_server() -> ForkServerContext:
    return start_fork_server()


@pytest.fixture
def ranks(fork_server: ForkServerContext, tmp_path: Path) -> Ranks:
    """Runs a script as the ranks of one job: ``ranks(script, world_size)``."""
    return Ranks(fork_server, tmp_path)


@contextlib.contextmanager
def made_pods(folder: Path, server: ForkServerContext | None = None) -> Iterator[Callable[..., Pods]]:
    """A function that makes pods, which are killed at the end."""
    made: list[Pods] = []

    def make(pods: int = 1, processes: int = 1, script: str = TRAIN, **variables: str) -> Pods:
        made.append(Pods(folder, free_port(), pods, processes, server, **variables))
        made[-1].write(script)
        return made[-1]

    with held_ports() as free_port:
        yield make
        for each in made:
            each.kill()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Callable[..., Pods]]:
    with made_pods(tmp_path) as make:
        yield make


@pytest.fixture
def forked_pods(fork_server: ForkServerContext, tmp_path: Path) -> Iterator[Callable[..., Pods]]:
    """As ``pods``, with launchers that are forked from a process that has imported torch."""
    with made_pods(tmp_path, fork_server) as make:
        yield make
