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
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

from flk.spec.job import Job
from flk.user_files import cache_folder, write_whole
from flk_runtime import contract
from flk_runtime.contract.strategies import AUTO, DILOCO

# Packages of flk_runtime that not all jobs use. All jobs have the options of DiLoCo, which are in the public API.
# "training", "records", "preparation" and "check" are no packages, but the modules of _ELSEWHERE that only jobs use
# which train, keep records in the cluster, install packages or run a setup command, or check a start.
OPTIONAL: Final = frozenset({"plan", "bench", "diloco", "training", "records", "preparation", "check"})
# The programs of flk_runtime with the packages that they use. `flk bench` compares its results with predictions.
_OF_PROGRAMS: Final = {
    "": {"training", "check"},
    "bench": {"bench", "plan"},
    "check": {"training", "check"},
    "diloco": {"diloco"},
    "plan": {"plan"},
}
_OF_ALL_JOBS: Final = ("diloco/__init__.py", "diloco/options.py")
_OF_MEMORY: Final = ("exchange", "messages", "partner", "room", "service", "store")
# Modules that only an OPTIONAL package needs, outside of it.
_ELSEWHERE: Final = {
    "check.py": "check",
    "checkpoint/gather.py": "training",
    "checkpoint/pod_exchange.py": "training",
    "launcher/health.py": "training",
    "launcher/hub.py": "diloco",
    "launcher/ledger.py": "training",
    "launcher/preparation.py": "preparation",
    "launcher/record_archive.py": "records",
    **dict.fromkeys((f"launcher/replication/{each}.py" for each in _OF_MEMORY), "training"),
    "run/adopt.py": "training",
    "run/loop.py": "training",
}
_BOOTSTRAP: Final = "bootstrap.py"
# The printable characters by their codes in the archive. bzip2 sorts by codes, and where characters that stand in like
# places are neighbours, as here, the archive takes a hundredth less. A search has found the order.
_ORDER: Final = b"@ .=!:}][),*\\{Z'(_->&+/z#~X0<|1234^56798VABCDUMHRJKLG`S$NYOPQITEFWsgq;aeoubd?fhrlmn\"jktcwpviy%x"
_DIGEST: Final = hashlib.sha256().digest_size
# Functions of flk_runtime.contract with the position of the argument that only the documentation reads.
_DOCUMENTED: Final = {"Variable": 1, "Setting": 1, "Meaning": 0}
_STRING_OR_COMMENT: Final = re.compile(
    r"""(?:\"\"\"(?:[^"\\]|\\.|"(?!""))*\"\"\"|\'\'\'(?:[^'\\]|\\.|'(?!''))*\'\'\')"""
    r"""|(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|[ \t]*(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)


def used_by(job: Job) -> frozenset[str]:
    """Return which OPTIONAL packages a job uses, as far as its options tell."""
    used = {"preparation"} if job.pip or job.requirements or job.setup else set()
    if job.records:
        used.add("records")
    module = job.command[1].split(".") if job.command[0] == "-m" else []
    if module[:1] == ["flk_runtime"]:
        return frozenset(used.union(_OF_PROGRAMS.get(".".join(module[1:2]), {"training"})))
    return frozenset(used.union({"training"}, {AUTO: {"plan"}, DILOCO: {"diloco"}}.get(job.strategy, ())))


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
        f"flk_runtime/{name}": _relative(stripped(source.decode()))
        for name, source in sorted(modules.items())
        if name != _BOOTSTRAP and (name in _OF_ALL_JOBS or _ELSEWHERE.get(name, name.partition("/")[0]) not in left_out)
    }
    text = json.dumps(sources).encode()
    members = {
        "__main__.py": stripped(modules[_BOOTSTRAP].decode()).encode(),
        "flk_runtime.packed": _ORDER + bz2.compress(text.translate(bytes.maketrans(_ORDER, bytes(sorted(_ORDER))))),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            kind = zipfile.ZIP_DEFLATED if name == "__main__.py" else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name), data, kind, 9)  # its date is 1980
    return buffer.getvalue()


def _relative(source: str) -> str:
    """Return the source of a module in the form that `flk_runtime.bootstrap.indented` reads."""
    lines, level = [], 0
    for line in source.split("\n"):
        if line:
            text = line.lstrip(" ")
            before, level = level, len(line) - len(text)
            line = chr(64 + level - before) + text
        lines.append(line)
    return "\n".join(lines)


def stripped(source: str) -> str:
    """Return the source of a module of flk without what only its readers need; all lines keep their numbers.

    Comments, annotations, imports and protocols for them, and lists of public names are left out. Docstrings, and texts
    that only the documentation reads, are empty. The fields of classes keep their annotations, which make dataclasses
    and messages.
    """
    source = _STRING_OR_COMMENT.sub(lambda match: "" if match["comment"] else match[0], source)
    lines = [line.encode() for line in source.split("\n")]  # columns count bytes
    for node, start, text in sorted(_parts_for_readers(ast.parse(source), lines), key=lambda part: -part[1]):
        first, last = node.lineno - 1, (node.end_lineno or 0) - 1
        rest = lines[last][node.end_col_offset :]
        lines[first : last + 1] = [lines[first][:start] + text, *[b""] * (last - first)]
        lines[last] += rest
    return b"\n".join(lines).decode()


def _parts_for_readers(tree: ast.Module, lines: Sequence[bytes]) -> Iterator[tuple[ast.expr | ast.stmt, int, bytes]]:
    """Yield the nodes that are left out, the columns where they begin, and what takes their place."""
    fields = {field for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for field in node.body}
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str()) as docstring):
                yield docstring, docstring.col_offset, b'""'
            case ast.Call(ast.Name(name), arguments) if name in _DOCUMENTED:
                meaning = arguments[_DOCUMENTED[name]]
                yield meaning, meaning.col_offset, b'""'
            case ast.If(ast.Name("TYPE_CHECKING")):
                yield node, node.col_offset, b""
            case ast.Assign([ast.Name("__all__")]) if names.count("__all__") == 1:  # this module does not read it
                yield node, node.col_offset, b""
            case ast.ClassDef(name, [ast.Name("Protocol")], decorator_list=[]):  # modules import the name
                yield node, node.col_offset, f"{name}=0".encode()
            case ast.arg(name, ast.expr() as annotation):
                yield annotation, node.col_offset + len(name.encode()), b""
            case ast.AnnAssign(target, annotation, ast.expr()) if node not in fields and _is_on_one_line(annotation):
                yield annotation, target.end_col_offset or 0, b""
            case (
                ast.FunctionDef(returns=ast.expr() as annotation)
                | ast.AsyncFunctionDef(returns=ast.expr() as annotation)
            ) if _is_on_one_line(annotation):
                before = lines[annotation.lineno - 1][: annotation.col_offset]
                yield annotation, len(before[: before.rindex(b"->")].rstrip()), b""


def _is_on_one_line(node: ast.expr) -> bool:
    return node.lineno == node.end_lineno
