"""Bare pytest runs no program that installs anything or touches a cluster; the variables of `make test` allow it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Tests that need Debian's packages, a package of PyPI, and a cluster.
NEEDY = [
    "tests/launchers/test_launchers.py::test_mpiexec_of_mpich",
    "tests/launchers/test_launchers.py::test_srun",
    "tests/launchers/test_launchers.py::test_horovodrun",
    "tests/cluster/test_k8s.py",
]
NOBODY_SETS = "FLK_TEST_UNSET"  # a variable in tests of an option that names one


def test_every_variable_of_tests_and_of_installers_is_on_the_page_for_contributors() -> None:
    folders = [path for name in ("tests", "scripts", "k8s", "benchmarks", ".ci") for path in (ROOT / name).rglob("*")]
    texts = [path.read_text() for path in folders if path.is_file() and path.suffix in ("", ".py")]
    found = {name for text in texts for name in re.findall(r"\bFLK_(?:TEST_\w+|\w+_MANIFEST)\b", text)}
    assert found
    listed = (ROOT / "CONTRIBUTING.md").read_text()
    assert sorted(name for name in found - {NOBODY_SETS} if f"`{name}" not in listed) == []


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A folder with programs that only record their calls, in the file that this returns, and then fail."""
    record = tmp_path / "calls"
    record.touch()
    for name in ("apt-get", "docker", "kind", "kubectl", "helm"):
        program = tmp_path / "programs" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>{record}\nexit 1\n')
        program.chmod(0o755)
    pip = tmp_path / "modules" / "pip.py"  # in place of `python -m pip`
    pip.parent.mkdir()
    pip.write_text(f"import sys\nopen({str(record)!r}, 'a').write(f'pip {{sys.argv[1:]}}\\n')\nsys.exit(1)\n")
    return record


def run_pytest(calls: Path, **variables: str) -> str:
    """Run the tests with nothing but these programs and variables, and return the summary line."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLK_", "PYTEST_", "XDG_"))}
    kept |= {"PATH": str(calls.parent / "programs"), "PYTHONPATH": str(calls.parent / "modules")}
    kept |= {"HOME": str(calls.parent / "home")} | variables
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *NEEDY]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_bare_pytest_installs_nothing_and_touches_no_cluster(calls: Path) -> None:
    summary = run_pytest(calls)
    assert re.match(r"\d+ skipped(, \d+ deselected)? in ", summary)  # none has passed
    assert calls.read_text() == ""
