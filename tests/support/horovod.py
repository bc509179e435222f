"""Horovod, which has no wheels: its launcher, which is Python, with a stand-in for its communicator, which is C++."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from tests.support.install import cache, pip, pip_install
from tests.support.requirements import locked

HOROVOD = "0.28.1"
NEEDS = {"cloudpickle": "cloudpickle", "psutil": "psutil", "yaml": "pyyaml", "packaging": "packaging", "cffi": "cffi"}


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
