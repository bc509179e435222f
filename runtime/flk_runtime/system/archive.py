"""The start of the archive that travels with a job: it unpacks the runtime, which the archive contains, and runs it.

The archive is a zip, which Python can run, with this file as ``__main__.py`` and one other member: a JSON object with
the sources of all modules by their paths, compressed. This file runs before anything of flk can be imported.
"""

from __future__ import annotations

import bz2
import hashlib
import importlib
import json
import os
import sys
import zipfile


def modules(data: bytes) -> dict[str, str]:
    """Return the sources of the modules in ``data``, the member of the archive, by their paths."""
    sources: dict[str, str] = json.loads(bz2.decompress(data))
    return sources


def unpacked(archive: str, work: str) -> str:
    """Return the folder with the runtime in ``archive``, below ``work``. It is unpacked once in each pod."""
    with zipfile.ZipFile(archive) as members:
        data = members.read(next(name for name in members.namelist() if name.endswith(".bz2")))
    folder = os.path.join(work, ".flk", hashlib.sha256(data).hexdigest()[:12])
    if not os.path.isdir(folder):
        new = f"{folder}.{os.getpid()}"
        for name, source in modules(data).items():
            path = os.path.join(new, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(source)
        try:
            os.rename(new, folder)
        except OSError:
            if not os.path.isdir(folder):  # no other process of this pod was faster
                raise
    return folder


def main() -> None:
    """Run `flk_runtime.__main__` from the archive that contains this file."""
    folder = unpacked(os.path.dirname(__file__), os.environ["FLK_WORK"])
    sys.path[0] = folder  # in place of the archive
    # For the processes that the launcher and the ranks start.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    # By its name: this module belongs to a layer below, and calls the program only as the archive's own __main__.
    importlib.import_module("flk_runtime.__main__").main()


if __name__ == "__main__":
    main()
