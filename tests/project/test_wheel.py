"""The wheel: its files, its commands in a fresh virtual environment, and its sources in every supported Python."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flk_runtime.contract import VERSION
from flk_runtime.contract.pod_layout import RUNTIME_PACKAGES
from tests.support.collection import often
from tests.support.install import interpreter

pytestmark = pytest.mark.xdist_group("wheel")  # it is built once
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source archive of the work tree, as a release makes it, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    archive = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    packed = subprocess.run(archive, cwd=ROOT, capture_output=True, text=True)
    assert packed.returncode == 0, packed.stderr
    (source,) = folder.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh virtual environment with the wheel and the packages of this Python."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    installed = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    # After the wheel's own packages on the module path; .pth files there, as of an editable install, are not read.
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    Path(site.stdout.strip(), "shared.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")) + "\n")
    return folder / "bin"


def run(commands: Path, *words: str, cwd: Path) -> str:
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FLK_IMAGE")}
    variables["PATH"] = f"{commands}:{variables['PATH']}"
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_contains_the_packages_and_the_example(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {"flk/py.typed", "flk/spec/hardware.json", "flk/bundled_gpt/train.py", "flk_runtime/py.typed"}
    assert expected <= names
    for folder, package in (("operator_client", "flk"), *(("runtime", package) for package in RUNTIME_PACKAGES)):
        sources = {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder / package).rglob("*.py")}
        assert sources <= names
    assert {name.partition("/")[0] for name in names} == {"flk", *RUNTIME_PACKAGES, f"flk-{VERSION}.dist-info"}


@pytest.mark.parametrize("command", ["flk", "kubectl-flk"])
def test_installed_commands_run(commands: Path, tmp_path: Path, command: str) -> None:
    assert run(commands, command, "--version", cwd=tmp_path) == f"flk {VERSION}\n"
    assert "name: gpt\n" in run(commands, command, "render", "--name", "gpt", cwd=tmp_path)  # the bundled example
    where = run(commands, str(commands / "python"), "-c", "import flk; print(flk.__file__)", cwd=tmp_path)
    assert where.startswith(str(commands.parent))


COMPILE = """
import pathlib, sys
for folder in sys.argv[1:]:
    for path in pathlib.Path(folder).rglob("*.py"):
        compile(path.read_bytes(), str(path), "exec")
import flk_runtime.contract, flk_runtime.__main__, flk.errors, flk.spec.labels, flk.spec.units, flk.spec.names
"""


# The oldest has the smallest grammar, and the newest have all warnings; machines may lack the last one.
@pytest.mark.parametrize("version", often((0, 3, 5), ["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"]))
def test_every_supported_python_compiles_the_sources(version: str) -> None:
    # What needs the standard library only is imported too.
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    packages = [ROOT / "operator_client", ROOT / "runtime"]
    folders = [*packages, ROOT / "examples", ROOT / "charts"]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-W", "error", "-c", COMPILE, *map(str, folders)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
