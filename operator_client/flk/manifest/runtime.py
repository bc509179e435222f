"""flk_runtime as it travels with a job: the packages that the job uses, without comments, docstrings and annotations.

Every line keeps its number, so that tracebacks match the sources. Equal sources make equal archives.
"""

from __future__ import annotations

import ast
import bz2
import contextlib
import hashlib
import io
import json
import re
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
# The programs of flk_runtime with the packages that they use. `flk bench` compares its results with predictions.
_OF_PROGRAMS: Final = {"plan": {"plan"}, "bench": {"bench", "plan"}, "diloco": {"diloco"}}
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
    module = job.command[1].split(".") if job.command[0] == "-m" else []
    if module[:1] == ["flk_runtime"]:
        return frozenset(_OF_PROGRAMS.get(".".join(module[1:2]), ()))
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
    sources = {
        f"flk_runtime/{name}": stripped(source.decode())
        for name, source in sorted(modules.items())
        if name != _BOOTSTRAP and (name in _OF_ALL_JOBS or re.split(r"[/.]", name)[0] not in left_out)
    }
    members = {
        "__main__.py": stripped(modules[_BOOTSTRAP].decode()).encode(),
        "flk_runtime.json.bz2": bz2.compress(json.dumps(sources).encode()),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # its date is 1980
    return buffer.getvalue()


def stripped(source: str) -> str:
    """Return the source of a module without comments and annotations, and with empty docstrings; all lines keep their
    numbers.

    The fields of classes keep their annotations, which make dataclasses and messages. It is made for the modules of
    flk: annotations are never evaluated there, and a string in three quotes that is alone on its lines, after a colon
    or at the beginning, is a docstring.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["comment"]:
            return ""
        before = source[: match.start()].rstrip(" ")
        alone = before[-1:] in ("", "\n") and source[match.end() : match.end() + 1] in ("", "\n")
        if match["long"] and alone and before.rstrip()[-1:] in ("", ":"):
            return '""' + "\n" * match[0].count("\n")
        return match[0]

    return _without_annotations(_STRING_OR_COMMENT.sub(replaced, source))


def _without_annotations(source: str) -> str:
    """Return the source of a module without those annotations that are on one line and of no field of a class."""
    tree = ast.parse(source)
    lines = [line.encode() for line in source.split("\n")]  # columns count bytes
    fields = {field for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for field in node.body}
    cuts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation:
            cuts.append((node.annotation, node.col_offset + len(node.arg.encode())))
        elif isinstance(node, ast.AnnAssign) and node.value and node not in fields:
            cuts.append((node.annotation, node.target.end_col_offset or 0))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            before = lines[node.returns.lineno - 1][: node.returns.col_offset]
            cuts.append((node.returns, before.rindex(b"->")))
    for annotation, start in sorted(cuts, key=lambda cut: -cut[1]):
        if annotation.lineno == annotation.end_lineno:
            line = lines[annotation.lineno - 1]
            lines[annotation.lineno - 1] = line[:start].rstrip() + line[annotation.end_col_offset :]
    return b"\n".join(lines).decode()
