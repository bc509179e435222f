"""The Python of this machine that runs launchers and plans."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from flk.errors import UsageError
from flk_runtime import contract

_INSTALL: Final = (
    "activate the environment that has torch, or install torch beside flk: "
    f"{sys.executable} -m pip install torch, or pipx inject flk torch"
)


def interpreter() -> tuple[str, str]:
    """Return the Python that runs the launchers, and what to add to its module path so that it finds flk_runtime.

    It is flk's own Python if that has torch, otherwise (flk installed by pipx, for instance) the one on PATH. Raises
    UsageError if neither has it.
    """
    if importlib.util.find_spec("torch"):
        return sys.executable, ""
    python = shutil.which("python3") or shutil.which("python")
    if not python:
        raise UsageError("no Python with torch: flk's own has none, and there is no python3 on PATH", hint=_INSTALL)
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([python, "-c", look], capture_output=True).returncode:
        raise UsageError(f"no Python with torch: neither flk's own nor {python} has it", hint=_INSTALL)
    return python, str(Path(contract.__file__).parents[2])
