"""The runtime as it travels with every job: all of its modules, without what only their readers need.

Equal sources make equal archives.
"""

from __future__ import annotations

import ast
import bz2
import contextlib
import hashlib
import io
import json
import re
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from flk.user.files import cache_folder, write_whole
from flk_runtime import contract
from flk_runtime.contract import pod_layout

_STRING: Final = (
    r"""(?:\"\"\"(?:[^"\\]|\\.|"(?!""))*\"\"\"|\'\'\'(?:[^'\\]|\\.|'(?!''))*\'\'\')"""
    r"""|(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
)
_COMMENT: Final = re.compile(rf"{_STRING}|(?P<comment>[ \t]*\#[^\n]*)", re.DOTALL)
_PARSING: Final = threading.Lock()  # before Python 3.12, ast fails in two threads at once
_DIGEST: Final = hashlib.sha256().digest_size


def runtime_archive() -> bytes:
    """Return the packages of the runtime as an archive that Python can run: `python3 flk_runtime.zip`.

    It is a zip with a program and, compressed, the modules, which the program unpacks. It is kept in the user's
    cache folder with a hash of its bytes and of all that it is made from, and packed anew where that differs.
    """
    folder = Path(contract.__file__).parents[2]
    paths = [path for package in pod_layout.RUNTIME_PACKAGES for path in (folder / package).rglob("*.py")]
    modules = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    parts = [part for name, source in sorted(modules.items()) for part in (name.encode(), source)]
    made_from = b"\0".join([Path(__file__).read_bytes(), *parts])
    kept = cache_folder() / "runtime"
    with contextlib.suppress(OSError):
        content = kept.read_bytes()
        digest, archive = content[:_DIGEST], content[_DIGEST:]
        if digest == hashlib.sha256(made_from + archive).digest():
            return archive
    archive = _packed(modules)
    with contextlib.suppress(OSError):  # the home may be read-only
        write_whole(kept, hashlib.sha256(made_from + archive).digest() + archive)
    return archive


def module_source(name: str) -> str:
    """Return the source of a module of the runtime, by its path, as the archive has it."""
    return stripped((Path(contract.__file__).parents[2] / name).read_text())


def stripped(source: str) -> str:
    """Return the source of a module without comments and docstrings, whose lines keep their numbers."""
    source = _COMMENT.sub(lambda match: "" if match["comment"] else match[0], source)
    with _PARSING:
        module = ast.parse(source)
    lines = [line.encode() for line in source.split("\n")]  # columns count bytes
    for docstring in _docstrings(module.body):
        first, last = docstring.lineno - 1, (docstring.end_lineno or 0) - 1
        rest = lines[last][docstring.end_col_offset :]
        lines[first : last + 1] = [lines[first][: docstring.col_offset] + b'""', *[b""] * (last - first)]
        lines[last] += rest
    return b"\n".join(lines).decode()


def _docstrings(body: Iterable[ast.stmt]) -> Iterator[ast.Expr]:
    """Yield the statements that are a text alone, among these statements and below."""
    for statement in body:
        if isinstance(statement, ast.Expr):
            if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                yield statement
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _docstrings(statement.body)


def _packed(modules: Mapping[str, bytes]) -> bytes:
    """Return modules, by their paths, as an archive."""
    sources = {name: stripped(source.decode()) for name, source in sorted(modules.items())}
    members = {
        "__main__.py": (zipfile.ZIP_DEFLATED, sources["flk_runtime/system/archive.py"].encode()),
        # One text: members of a zip, which are compressed one by one, would take nearly twice the space.
        "flk_runtime.json.bz2": (zipfile.ZIP_STORED, bz2.compress(json.dumps(sources).encode())),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, (kind, data) in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, kind)  # its date is 1980
    return buffer.getvalue()
