"""Horovod, which has no wheels: its launcher, which is Python, and all of it, built for this Python and this torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path

from tests.support.install import INSTALL, NOT_ALLOWED, all_of, cache, from_debian, pip, pip_install
from tests.support.requirements import locked, may_install

HOROVOD = "0.28.1"
NEEDS = {"cloudpickle": "cloudpickle", "psutil": "psutil", "yaml": "pyyaml", "packaging": "packaging", "cffi": "cffi"}
BUILT_WITH = ("cmake", "make", "g++")  # and Debian's packages of the same names
BUILD_FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # its projects are older than what today's cmake accepts unasked
}


def launcher_with_stand_in() -> tuple[Path | None, str]:
    """A folder with horovodrun and a stand-in for `horovod.torch`, or None with the reason. It takes two seconds."""
    folder = cache() / f"horovodrun-{HOROVOD}-{sysconfig.get_config_var('SOABI')}"
    with locked("horovodrun"):
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                if reason := _download_launcher(Path(name)):
                    return None, reason
                Path(name, "site").rename(folder)
    shutil.copy(Path(__file__).with_name("horovod_torch.py"), folder / "horovod" / "torch.py")
    return folder, ""


def _download_launcher(folder: Path) -> str:
    """Put the Python part of Horovod and what it needs into ``folder``/site. Returns the reason if that fails."""
    source = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--dest", str(folder)]
    if reason := pip("download", *source, f"horovod=={HOROVOD}"):
        return reason
    with tarfile.open(folder / f"horovod-{HOROVOD}.tar.gz") as archive:
        members = [each for each in archive.getmembers() if each.name.startswith(f"horovod-{HOROVOD}/horovod/")]
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's Python 3.11.2 has no filters
        archive.extractall(folder, members)
    (folder / "site").mkdir()
    (folder / f"horovod-{HOROVOD}" / "horovod").rename(folder / "site" / "horovod")
    shutil.rmtree(folder / "site" / "horovod" / "torch")
    missing = [package for module, package in NEEDS.items() if not importlib.util.find_spec(module)]
    return pip_install(folder / "site", *missing) if missing else ""


class Build:
    """The build of Horovod for this Python and this torch, in a thread, into a folder of its own in the cache."""

    def __init__(self) -> None:
        torch = version("torch")
        python = sysconfig.get_config_var("SOABI")
        self.folder = cache() / f"horovod-{HOROVOD}-torch-{torch}-{python}-{platform.machine()}"
        self.reason = ""
        self._thread = threading.Thread(target=self._build_once, daemon=True)
        self._thread.start()

    def wait(self) -> Path | None:
        """The folder with Horovod, or None with the reason in ``reason``."""
        self._thread.join(INSTALL)
        return self.folder if self.folder.exists() else None

    def _build_once(self) -> None:
        with locked("horovod"):
            if not self.folder.exists():
                try:
                    self.reason = self._build()
                except (OSError, subprocess.SubprocessError) as error:
                    self.reason = str(error)

    def _build(self) -> str:
        if not may_install():
            return NOT_ALLOWED
        if not all_of(*BUILT_WITH) and (reason := from_debian(*BUILT_WITH)):
            return f"{', '.join(BUILT_WITH)} are needed to build it: {reason}"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as name:
            # torch's headers ask for C++17, after Horovod has asked for less. Its build asks for debugging information
            # and for optimization too, which tests do not need, and which take half of the compiler's time.
            compiler = Path(name, "c++17")
            compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -std=c++17 -g0 -O0\n')
            compiler.chmod(0o755)
            target = Path(name, "site")
            for more in (
                ["--no-deps", "--no-build-isolation", f"horovod=={HOROVOD}"],
                list(NEEDS.values()),  # and not another torch
            ):
                if reason := pip_install(target, *more, env=BUILD_FLAGS | {"CXX": str(compiler)}):
                    return reason
            target.rename(self.folder)
        return ""
