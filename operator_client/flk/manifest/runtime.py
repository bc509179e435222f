"""flk_runtime as it travels with a job: only the packages that the job uses, without comments and docstrings.

Every line keeps its number, so that tracebacks match the sources. Equal sources make equal archives.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import io
import re
import tarfile
import zipfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final

from flk.spec.job import Job
from flk.user_files import cache_folder, write_whole
from flk_runtime import contract
from flk_runtime.contract.strategies import AUTO, DILOCO

# Packages of flk_runtime that most jobs do not use. All jobs have the options of DiLoCo, which are in the public API.
OPTIONAL: Final = frozenset({"plan", "bench", "diloco"})
_OF_ALL_JOBS: Final = ("diloco/__init__.py", "diloco/options.py")
_BOOTSTRAP: Final = "bootstrap.py"
_DIGEST: Final = hashlib.sha256().digest_size
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

    It is a zip with the bootstrap and, compressed, the modules, which the bootstrap unpacks. It is kept in the user's
    cache folder with a hash of its bytes and of all that it is made from, and packed anew where that differs.
    """
    folder = Path(contract.__file__).parents[1]
    modules = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}
    kept = cache_folder() / "-".join(["runtime", *sorted(optional)])
    made_from = repr((kept.name, Path(__file__).read_bytes(), sorted(modules.items()))).encode()
    with contextlib.suppress(OSError):
        content = kept.read_bytes()
        digest, archive = content[:_DIGEST], content[_DIGEST:]
        if digest == hashlib.sha256(made_from + archive).digest():
            return archive
    archive = _packed(modules, OPTIONAL - optional)
    with contextlib.suppress(OSError):  # the home may be read-only
        write_whole(kept, hashlib.sha256(made_from + archive).digest() + archive)
    return archive


def _packed(modules: Mapping[str, bytes], left_out: Set[str]) -> bytes:
    """Return modules, by their paths, as an archive without some of the OPTIONAL packages."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, source in sorted(modules.items()):
            if name != _BOOTSTRAP and (name.partition("/")[0] not in left_out or name in _OF_ALL_JOBS):
                data = stripped(source.decode()).encode()
                member = tarfile.TarInfo(f"flk_runtime/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        members = {
            "__main__.py": modules[_BOOTSTRAP],
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
