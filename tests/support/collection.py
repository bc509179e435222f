"""The tests of a run: those of a folder, their order, and modules that need a package."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

# The part of a run in which the tests of a folder begin. Those of the other folders begin in all of it. Before cluster
# tests begin, one worker loads the images with the first test of a group. None is left with a long test at the end.
SPANS = {"cluster": (0.3, 0.85), "local": (0.0, 0.95)}


def spread(folders: Sequence[str]) -> list[int]:
    """Return the indices of tests in their order: those of each folder evenly over its span. ``folders`` are theirs."""
    total, seen, places = Counter(folders), Counter[str](), []
    for folder in folders:
        begin, end = SPANS.get(folder, (0.0, 1.0))
        places.append(begin + (end - begin) * (seen[folder] + 0.5) / total[folder])
        seen[folder] += 1
    return sorted(range(len(folders)), key=places.__getitem__)


def in_folder(items: Iterable[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    """The tests below a folder. Paths are compared as text, since each worker asks this for thousands of tests."""
    prefix = f"{folder}{os.sep}"
    return (item for item in items if str(item.path).startswith(prefix))


def rewrite_assertions(config: pytest.Config, folder: Path) -> None:
    """Write the byte code of the tests below a folder, with assertions that show their values, where there is none.

    pytest has no name for this. It is what its import of each module does first.
    """
    if sys.dont_write_bytecode or config.getoption("assertmode") != "rewrite":
        return
    for path in (*folder.rglob("test_*.py"), *folder.rglob("conftest.py")):
        cache = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, cache) is None and rewrite.try_makedirs(cache.parent):
            status, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, cache)


def skip_without(package: str) -> None:
    """Skip a module of tests if a package that their ranks import is not installed.

    Nothing is imported, which would take seconds in each worker.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)


def often(numbers: Sequence[int], cases: Iterable[Any]) -> list[Any]:
    """The parameters of a test: the cases with these numbers, from 0, and for the soak the others."""
    return [case if number in numbers else for_the_soak(case) for number, case in enumerate(cases)]


def for_the_soak(case: Any) -> Any:
    """The parameters of a test that only the soak runs."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
