"""The other Pythons that flk supports: the client's unit tests in environments of their own, without torch."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.install import NOT_ALLOWED, cache, interpreter, said
from tests.support.requirements import locked, may_install, unavailable

ROOT = Path(__file__).parents[2]
# Of the packages with the tests, those that bring no torch and that the client's tests use.
USED = ("hypothesis", "jsonschema", "pytest", "pytest-timeout", "pytest-xdist", "rich", "syrupy")
VERSIONS = ["3.10", "3.12", "3.13", "3.14", "3.15"]  # beside 3.11, which all tests run on
OF_TORCH = "tests/unit/flk/local/test_bench.py"


def name_of_environment(version: str, build: str, required: Sequence[str]) -> str:
    """The folder of an environment, which is another one for another build of Python and for other requirements."""
    return f"client-{version}-{hashlib.sha256(repr((build, sorted(required), USED)).encode()).hexdigest()[:12]}"


def python_with_tests(version: str) -> Path | None:
    """The Python of an environment of this version, which is made once and kept in the cache; None without it."""
    base = interpreter(version)
    if base is None:
        return None
    required = metadata.requires("flk") or []
    folder = cache() / name_of_environment(version, said([base, "-VV"]), required)
    python = folder / "bin" / "python"
    wanted = [line.partition(";")[0] for line in required if "extra == " in line]
    used = [each for each in wanted if re.match(r"[\w-]+", each)[0] in USED]  # type: ignore[index]
    assert len(used) == len(USED), used
    with locked(folder.name):
        if not (folder / "made").exists():
            subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(python), "-m", "pip"]
            subprocess.run([*pip, "install", "--quiet", str(ROOT), *used], check=True)
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", "flk"], check=True)
            (folder / "made").touch()
    return python


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_client_works_with_another_python(version: str) -> None:
    if not may_install():
        unavailable(NOT_ALLOWED)
    python = python_with_tests(version)
    if python is None:
        unavailable(f"Python {version} is not installed")
    packages = os.pathsep.join(str(ROOT / folder) for folder in ("operator_client", "runtime"))
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/unit/flk", f"--ignore={OF_TORCH}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": packages},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    print(done.stdout.splitlines()[-1])


def test_what_is_left_out_exists() -> None:
    assert (ROOT / OF_TORCH).is_file()
