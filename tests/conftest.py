"""For all tests: their order and processor time, flk's cache, a folder in memory, generated examples without a time
limit, and processes that one can interrupt."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.collection import rewrite_assertions, spread
from tests.support.processor_time import ProcessorTime

settings.register_profile("flk", max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flk")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell without job control starts background commands so, and their children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Before the workers of a new checkout start: each of them would take five seconds for the same."""
    rewrite_assertions(config, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection, and never look at what they have made again.

    The modules and tests of a worker are half a million objects, and each full collection would visit them all.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the tests of each folder evenly over its span of a run with several workers.

    Tests in a cluster mostly wait for it; the others use the processors meanwhile. The workers begin with the groups of
    tests that one of them runs, the largest first.
    """
    if not hasattr(config, "workerinput"):
        return
    folders = [item.nodeid.split("/")[1] for item in items]
    items[:] = [items[index] for index in spread(folders)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what only root may do where the tests run as another user."""
    if (mark := item.get_closest_marker("root")) and os.geteuid() != 0:
        pytest.skip(f"{mark.args[0]}, which needs root")


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XDG_CACHE_HOME of this run's tests in all workers. Each runtime that jobs ship is packed once, in a second."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory for the launchers and the checkpoints of a test."""
    folder = Path(tempfile.mkdtemp(prefix="flk-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
