"""The oldest torch is refused with one line, and the same number stands in the package and in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flk_runtime.errors import SetupError
from flk_runtime.system.torch_version import OLDEST, check_torch

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "guides" / "install.md"


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu124"])
def test_an_older_torch_is_refused_with_one_line(version: str) -> None:
    with pytest.raises(SetupError) as caught:
        check_torch(version)
    expected = f"torch {version} is too old: flk needs torch 2.6 or newer; use an image that has it"
    assert str(caught.value) == expected


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.10.0a0+git1234", "3.0.0"])
def test_a_newer_torch_is_taken(version: str) -> None:
    check_torch(version)


def test_the_package_and_the_documentation_state_the_same_version() -> None:
    oldest = ".".join(map(str, OLDEST))
    assert f'runtime = ["torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    stated = [
        found
        for page in (ROOT / "docs").rglob("*.md")
        for found in re.findall(r"torch\W{1,3}(?:\(extra `runtime`, )?(\d\.\d+) or newer", page.read_text())
    ]
    assert len(stated) >= 2
    assert set(stated) == {oldest}
    assert f"| torch {oldest} or newer |" in PAGE.read_text()


def test_the_page_has_each_version_that_something_needs() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "runtime").rglob("*.py"))
    needed = re.findall(r'require_torch\(\s*"([\d.]+)"', sources)
    assert len(needed) >= 2
    rows = [line.split("|")[2].strip() for line in PAGE.read_text().splitlines() if line.count("|") == 4]
    assert set(needed) <= set(rows)
