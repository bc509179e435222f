"""A wheel made by hand: a package that needs one of this Python, and has a program."""

from __future__ import annotations

import zipfile
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: flkdemo\nVersion: 1.0\nRequires-Dist: {}\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: flk\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
PROGRAM = "[console_scripts]\nflkdemo = flkdemo:main\n"


def wheel(folder: Path, needs: str) -> Path:
    """Write the wheel, whose module and program print the file of the module ``needs``."""
    path = folder / "flkdemo-1.0-py3-none-any.whl"
    files = {"METADATA": METADATA.format(needs), "WHEEL": WHEEL, "entry_points.txt": PROGRAM, "RECORD": ""}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flkdemo.py", f"import {needs}\ndef main():\n    print({needs}.__file__)\n")
        for name, text in files.items():
            archive.writestr(f"flkdemo-1.0.dist-info/{name}", text)
    return path
