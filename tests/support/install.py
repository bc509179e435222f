"""Programs that tests install where they may: Debian's packages, and packages of PyPI in a cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.requirements import locked, may_install, unavailable

INSTALL = 1200.0  # seconds for installing or building a launcher
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NOT_ALLOWED = "FLK_TEST_INSTALL=yes, which `make test` sets, would install it"


def program(*names: str, says: str = "") -> str | None:
    """The path of the first of these programs that is installed and whose --version output contains ``says``."""
    for name in names:
        path = shutil.which(name, path=SEARCH)
        if path and (not says or says in said([path, "--version"])):
            return path
    return None


def interpreter(version: str) -> str | None:
    """A Python of this version: on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def said(command: Sequence[str]) -> str:
    """Return what a command prints on stdout and stderr."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return done.stdout + done.stderr


def from_debian(*packages: str) -> str:
    """Install Debian's packages. Returns the reason why that was not possible, or an empty text."""
    if not may_install():
        return NOT_ALLOWED
    if not shutil.which("apt-get"):
        return "there is no apt-get to install it with"
    if os.geteuid() != 0:
        return "only root can install it"
    command = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    with locked("apt"):
        for before in (None, ["apt-get", "update", "--quiet"]):  # the lists of packages may be old, or not there
            if before:
                subprocess.run(before, capture_output=True, timeout=INSTALL)
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL, env=environment)
            if done.returncode == 0:
                return ""
    return f"apt-get install says: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]}"


def cache() -> Path:
    """The folder that keeps what was built for the next test session."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flk-tests"


def pip_install(target: Path, *what: str, env: Mapping[str, str] = {}) -> str:
    """Install packages into a folder of their own. Returns the reason why that was not possible, or an empty text."""
    return pip("install", "--target", str(target), *what, env=env)


def pip(command: str, *arguments: str, env: Mapping[str, str] = {}) -> str:
    """Call pip. Returns the reason why that was not possible, or an empty text."""
    if not may_install():
        return NOT_ALLOWED
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-cache-dir", *arguments],
        env=os.environ | dict(env),
        capture_output=True,
        text=True,
        timeout=INSTALL,
    )
    return f"pip {command} ended with {done.returncode}:\n{done.stderr[-2000:]}" if done.returncode else ""


def needed(find: Callable[[], Any], *packages: str) -> Any:
    """Return the result of ``find``, after the installation of ``packages`` if it was empty before."""
    found = find()
    if not found:
        reason = from_debian(*packages)
        found = find()
        if not found:
            unavailable(f"Debian's {' '.join(packages)} cannot be used: {reason or 'installed, and still not found'}")
    return found


def all_of(*names: str) -> list[str] | None:
    """The paths of these programs, or None where one is not installed."""
    paths = [program(name) for name in names]
    return [path for path in paths if path] if all(paths) else None
