"""make: what it says before it installs anything."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "--always-make", *words], cwd=ROOT, capture_output=True, text=True
    )


def test_a_python_without_virtual_environments_is_named_with_the_package_that_debian_lacks(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = make("venv", f"PYTHON={python}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"make: {python} cannot make virtual environments: install Debian's package python3-venv, or set PYTHON= to "
        "another Python"
    )
    assert done.stdout == ""


def test_an_old_python_is_named_before_anything_is_installed(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\ncase $2 in *ensurepip*) exit 0 ;; esac\nexit 1\n")
    python.chmod(0o755)
    done = make("venv", f"PYTHON={python}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"make: {python} is older than Python 3.10: set PYTHON= to another Python"
    assert done.stdout == ""


def test_torch_index_names_where_torch_comes_from() -> None:
    large = "CUDA's libraries"
    from_pypi, from_index = (make("--dry-run", "venv", f"TORCH_INDEX={each}") for each in ("", "https://index.example"))
    assert large in from_pypi.stdout
    assert "--index-url" not in from_pypi.stdout
    assert large not in from_index.stdout
    assert "pip install --quiet --no-compile --index-url 'https://index.example' 'torch==" in from_index.stdout


def test_every_command_of_make_check_runs_before_a_commit() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    commands = {line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()}
    assert len(commands) > 4
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["entry"].replace(" --force-exclude", "") for hook in local["hooks"]}
    assert commands <= hooks
