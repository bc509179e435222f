"""Import rules beside the contracts of `make check`: neither the client nor the launcher imports torch."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import flk_runtime

ROOT = Path(__file__).parents[2]


def loaded_by(modules: list[str]) -> set[str]:
    """Names of the top-level modules in a new interpreter that has imported these."""
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
    # The contracts look at import statements. This imports the modules, and so runs the lazy __init__ of flk_runtime.
    modules = modules_of("operator_client", "flk")
    assert "flk.spec.job" in modules
    assert not loaded_by(modules) & {"torch", "numpy"}


def test_the_launcher_imports_only_the_standard_library_and_zlib_ng_until_it_needs_torch() -> None:
    launcher = [name for name in modules_of("runtime", "flk_runtime") if name.startswith("flk_runtime.launcher")]
    assert "flk_runtime.launcher.coordinator.leader" in launcher
    shared = [
        "flk_runtime.contract",
        "flk_runtime.errors",
        "flk_runtime.shared",
        "flk_runtime.system",
        "flk_runtime.__main__",
    ]
    shared += ["flk_runtime.shared.failure_report", "flk_runtime.system.host", "flk_runtime.system.text"]
    # loaded_by([]): what the interpreter's own site packages import at its start. __mp_main__: multiprocessing's name
    # of __main__.
    known = set(sys.stdlib_module_names) | loaded_by([]) | {"__mp_main__"}
    assert loaded_by(launcher + shared) - known == {"flk_runtime", "zlib_ng"}


def test_no_submodule_hides_a_public_name() -> None:
    # An import of a submodule sets the attribute of its name: a module flk_runtime.init would replace the function.
    submodules = {module.name for module in pkgutil.iter_modules(flk_runtime.__path__)}
    assert "training" in submodules
    assert not submodules & set(flk_runtime.__all__)
    assert flk_runtime.init is importlib.import_module("flk_runtime.training.entry.init").init
