"""flk_runtime as it travels with a job: only the packages that the job uses, without comments and docstrings.

Every line keeps its number, so that tracebacks match the sources. Equal sources make equal archives.
"""

from __future__ import annotations

import bz2
import io
import re
import tarfile
import zipfile
from collections.abc import Set
from pathlib import Path
from typing import Final

from flk.spec.job import Job
from flk_runtime import contract
from flk_runtime.contract.strategies import AUTO, DILOCO

# Packages of flk_runtime that most jobs do not use. All jobs have the options of DiLoCo, which are in the public API.
OPTIONAL: Final = frozenset({"plan", "bench", "diloco"})
_OF_ALL_JOBS: Final = ("diloco/__init__.py", "diloco/options.py")
_BOOTSTRAP: Final = "bootstrap.py"
_STRING_OR_COMMENT: Final = re.compile(
    r'''(?P<long>"""(?:[^"\\]|\\.|"(?!""))*"""|\'\'\'(?:[^'\\]|\\.|'(?!''))*\'\'\')'''
    r"""|(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|[ \t]*(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)


def used_by(job: Job) -> frozenset[str]:
    """Return which OPTIONAL packages a job uses, as far as its options tell."""
    if job.command[0] == "-m" and job.command[1].startswith(tuple(f"flk_runtime.{name}" for name in OPTIONAL)):
        return OPTIONAL
    return frozenset({AUTO: {"plan"}, DILOCO: {"diloco"}}.get(job.strategy, ()))


def runtime_archive(optional: Set[str] = OPTIONAL) -> bytes:
    """Return flk_runtime and these OPTIONAL packages as an archive that Python can run: `python3 flk_runtime.zip`.

    It is a zip with the bootstrap and, compressed, the modules, which the bootstrap unpacks.
    """
    folder = Path(contract.__file__).parents[1]
    left_out = OPTIONAL - optional
    modules = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(modules):
            if name != _BOOTSTRAP and (name.partition("/")[0] not in left_out or name in _OF_ALL_JOBS):
                data = stripped(modules[name].read_text(encoding="utf-8")).encode()
                member = tarfile.TarInfo(f"flk_runtime/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        members = {
            "__main__.py": modules[_BOOTSTRAP].read_bytes(),
            "flk_runtime.tar.bz2": bz2.compress(plain.getvalue()),
        }
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # its date is 1980
    return buffer.getvalue()


def stripped(source: str) -> str:
    """Return the source of a module without comments, and with empty docstrings; all lines keep their numbers.

    It is made for the modules of flk, where a string in three quotes that is alone on its lines, after a colon or at
    the beginning, is a docstring.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["comment"]:
            return ""
        before = source[: match.start()].rstrip(" ")
        alone = before[-1:] in ("", "\n") and source[match.end() : match.end() + 1] in ("", "\n")
        if match["long"] and alone and before.rstrip()[-1:] in ("", ":"):
            return '""' + "\n" * match[0].count("\n")
        return match[0]

    return _STRING_OR_COMMENT.sub(replaced, source)
