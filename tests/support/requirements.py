"""The requirements of tests beyond Python: what may be changed on this machine for them, and how tests skip without.

Without these variables nothing is installed and no cluster is created or used. `make test` sets the first two.

FLK_TEST_INSTALL=yes: launchers are installed from Debian's packages and built from PyPI.
FLK_TEST_CLUSTER=create: the kind cluster is used for tests, and created if it does not exist.
FLK_TEST_CLUSTER=required: the same, and a test fails where it would be skipped. Continuous integration sets it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

REQUIRED = "required"
with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def may_install() -> bool:
    return os.environ.get("FLK_TEST_INSTALL") == "yes"


def may_create_cluster() -> bool:
    return os.environ.get("FLK_TEST_CLUSTER") in ("create", REQUIRED)


def unavailable(reason: str) -> NoReturn:
    """Skip the test with this reason, or fail it under FLK_TEST_CLUSTER=required."""
    if os.environ.get("FLK_TEST_CLUSTER") == REQUIRED:
        pytest.fail(f"FLK_TEST_CLUSTER=required, but {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock of this name, which one process of all test runs on this machine can hold at a time."""
    path = Path(tempfile.gettempdir()) / f"flk-tests-{os.getuid()}-{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
