"""Other releases of torch, from the oldest that flk works with: tests of the runtime in environments of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from flk_runtime.system.torch_version import OLDEST
from tests.support.install import NOT_ALLOWED, cache
from tests.support.requirements import locked, may_install, unavailable

ROOT = Path(__file__).parents[2]
VERSIONS = [".".join(map(str, OLDEST)) + ".0", "2.9.1", "2.14.1", "2.15.0"]
FILES = [
    "strategies", "sharded_checkpoints", "optimizers", "precision", "memory", "loop",
    "wrapped_models", "compile", "plan", "weights", "accumulation", "script_checkpoints", "elastic",
    "preemption", "hangs", "matrix",
]  # fmt: skip
HOURS = 3600


def python_with(torch: str) -> Path:
    """The Python of an environment with this torch, which is made once and kept in the cache."""
    folder = cache() / f"torch-{torch}-{sys.version_info[0]}.{sys.version_info[1]}"
    python = folder / "bin" / "python"
    index = os.environ.get("TORCH_INDEX")  # of torch's builds for CPUs; those of PyPI are for CUDA and run on CPUs too
    with locked(folder.name):
        if not (folder / "made").exists():
            venv.create(folder, with_pip=True, clear=True)
            pip = [str(python), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, *(["--index-url", index] if index else []), f"torch=={torch}"], check=True)
            # Named again, so that no package brings another one.
            subprocess.run([*pip, f"{ROOT}[dev,runtime]", f"torch=={torch}"], check=True)
            subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "flk"], check=True)
            (folder / "made").touch()
    return python


@pytest.mark.soak
@pytest.mark.timeout(4 * HOURS)
@pytest.mark.parametrize("torch", VERSIONS)
def test_the_runtime_works_with_another_torch(torch: str) -> None:
    if not may_install():
        unavailable(NOT_ALLOWED)
    tests = ["tests/unit/flk_runtime", *(f"tests/local/test_{name}.py" for name in FILES)]
    command = [python_with(torch), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *tests]
    packages = os.pathsep.join(str(ROOT / folder) for folder in ("operator_client", "runtime"))
    variables = os.environ | {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    print(done.stdout.splitlines()[-1])


def test_files_exist() -> None:
    assert [name for name in FILES if not (ROOT / "tests" / "local" / f"test_{name}.py").is_file()] == []
