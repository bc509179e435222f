"""Who may import whom: the contracts in pyproject.toml hold, and importing the client brings no torch with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level modules that a fresh interpreter has after importing these."""
    script = "import importlib, json, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\n"
    script += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", script, *modules], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def modules_of(folder: str, package: str) -> list[str]:
    root = ROOT / folder
    paths = sorted((root / package).rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def test_whole_client_imports_without_torch() -> None:
    # The contracts see what modules say; this sees what happens, as through the __init__ of flk_runtime.
    modules = modules_of("operator_client", "flk")
    assert "flk.spec.job" in modules
    assert not loaded_by(modules) & {"torch", "numpy"}


@pytest.mark.parametrize("module", ["flk_runtime.contract", "flk_runtime.__main__"])
def test_what_a_pod_starts_with_is_the_standard_library(module: str) -> None:
    assert loaded_by([module]) <= set(sys.stdlib_module_names) | {"flk_runtime", "__main__"} | loaded_by([])
