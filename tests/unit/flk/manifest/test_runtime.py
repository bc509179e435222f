"""The runtime that travels with a job: what the job uses, as the sources have it, line by line."""

from __future__ import annotations

import ast
import bz2
import io
import json
import zipfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import pytest

import flk_runtime
from flk.manifest import runtime
from flk.manifest.runtime import OPTIONAL, runtime_archive, stripped, used_by
from flk.spec.job import validated

FOLDER = Path(flk_runtime.__path__[0])
SOURCES = sorted(FOLDER.rglob("*.py"))
LIMIT = 150_000  # bytes
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def members(archive: bytes) -> dict[str, str]:
    """The modules in an archive, by their paths in the package."""
    with zipfile.ZipFile(io.BytesIO(archive)) as outer:
        sources = json.loads(bz2.decompress(outer.read("flk_runtime.json.bz2")))
    return {name.removeprefix("flk_runtime/"): source for name, source in sources.items()}


class Unannotated(ast.NodeTransformer):
    """Takes the annotations of functions and variables away, but not those of a class's fields."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.body = [each if isinstance(each, ast.AnnAssign) else self.visit(each) for each in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return ast.copy_location(ast.Assign([node.target], node.value), node) if node.value else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("annotation", "returns"):
            if hasattr(node, name):
                setattr(node, name, None)
        return super().generic_visit(node)


def tree(source: str) -> list[Any]:
    """What a module does: its syntax with the number of each line, but the texts of its docstrings and annotations."""
    module = Unannotated().visit(ast.parse(source))
    docstrings = set()
    for node in ast.walk(module):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
    return [
        (
            type(node).__name__,
            getattr(node, "lineno", 0),
            getattr(node, "value", "") if type(node) is ast.Constant else "",
        )
        for node in ast.walk(module)
        if node not in docstrings
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_a_module_does_the_same_on_the_same_lines(path: Path) -> None:
    source = path.read_text()
    assert tree(stripped(source)) == tree(source)


def test_strings_and_what_looks_like_comments_in_them_stay() -> None:
    kept = 'return "# no", x("""\n"""), {1:\n"""y"""}'
    source = f'def f():\n    """A docstring, # of\n    two lines."""\n    # a comment\n    {kept}  # yes\n'
    expected = f'def f():\n    ""\n\n\n    {kept}\n'
    assert stripped(source) == expected


def test_fields_of_classes_keep_their_annotations() -> None:
    source = (
        "def f(a: int, *b: str, c: int = 1) -> list[\n    int\n]:\n    é: str = g('é', d=2)\n    e: int\n"
        "async def h(a: int) -> str: ...\n"
        "class A:\n    x: int\n    y: int = 1\n    def m(self) -> int:\n        self.z: int = 2\n"
    )
    expected = (
        "def f(a, *b, c = 1) -> list[\n    int\n]:\n    é = g('é', d=2)\n    e: int\n"
        "async def h(a): ...\n"
        "class A:\n    x: int\n    y: int = 1\n    def m(self):\n        self.z = 2\n"
    )
    assert stripped(source) == expected


def test_a_plain_job_ships_nothing_that_it_does_not_use() -> None:
    archive = runtime_archive(used_by(validated({"command": "train.py"})))
    found = members(archive)
    assert {name for name in found if name.partition("/")[0] in OPTIONAL} == {"diloco/__init__.py", "diloco/options.py"}
    assert set(members(runtime_archive())) == {path.relative_to(FOLDER).as_posix() for path in SOURCES} - {
        "bootstrap.py"
    }
    assert archive == runtime_archive(frozenset())


JOBS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({"strategy": "full_shard"}, set()),
    "auto": ({"strategy": "auto"}, {"plan"}),
    "diloco": ({"strategy": "diloco"}, {"diloco"}),
    "bench": ({"command": ["-m", "flk_runtime.bench", "{}", "train.py"]}, {"bench", "plan"}),
    "hub": ({"command": ["-m", "flk_runtime.diloco", "--listen", ":29401"]}, {"diloco"}),
    "hub's module": ({"command": ["-m", "flk_runtime.diloco.__main__"]}, {"diloco"}),
    "plan": ({"command": ["-m", "flk_runtime.plan", "train.py"]}, {"plan"}),
    "check": ({"command": ["-m", "flk_runtime.check"]}, set()),
    "runtime": ({"command": ["-m", "flk_runtime", "check"]}, set()),
    "other module": ({"command": ["-m", "plan.bench"], "strategy": "auto"}, {"plan"}),
}


@pytest.mark.parametrize(("fields", "expected"), JOBS.values(), ids=JOBS.keys())
def test_a_job_ships_the_packages_that_it_uses_in_at_most_150_kilobytes(
    fields: dict[str, Any], expected: set[str]
) -> None:
    used = used_by(validated({"command": "train.py", **fields}))
    assert used == expected
    assert len(runtime_archive(used)) <= LIMIT


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the archive of a plain job is kept: in a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flk" / "runtime"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Set[str]]:
    """The packages that were left out, for each archive that is packed from now on."""
    calls: list[Set[str]] = []
    pack = runtime._packed

    def counted(modules: Mapping[str, bytes], left_out: Set[str]) -> bytes:
        calls.append(left_out)
        return pack(modules, left_out)

    monkeypatch.setattr(runtime, "_packed", counted)
    return calls


def test_an_archive_is_packed_once_for_the_same_sources(kept: Path, packed: list[Set[str]]) -> None:
    choices: list[Set[str]] = [frozenset(), {"plan"}, OPTIONAL]
    first = [runtime_archive(optional) for optional in choices]
    assert [runtime_archive(optional) for optional in choices] == first
    assert packed == [OPTIONAL, {"bench", "diloco"}, frozenset()]
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other packages", "other sources", "unreadable"])
def test_an_archive_that_is_not_what_it_should_be_is_packed_anew(
    kept: Path, packed: list[Set[str]], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    archive, other = runtime_archive(frozenset()), runtime_archive({"plan"})
    content = kept.read_bytes()
    if damage == "cut":
        kept.write_bytes(content[:-1])
    elif damage == "changed":
        kept.write_bytes(content[:-1] + b"x")
    elif damage == "empty":
        kept.write_bytes(b"")
    elif damage == "other packages":
        kept.write_bytes(kept.with_name("runtime-plan").read_bytes())
    elif damage == "other sources":
        monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [folder / "bootstrap.py", folder / "errors.py"])
    else:
        kept.unlink()
        kept.mkdir()
    packed.clear()
    again = runtime_archive(frozenset())
    assert packed == [OPTIONAL]
    assert other != again
    assert (again == archive) == (damage != "other sources")


def test_without_a_folder_for_the_cache_an_archive_is_packed_each_time(kept: Path, packed: list[Set[str]]) -> None:
    kept.parent.write_text("a file, not a folder")
    assert runtime_archive(frozenset()) == runtime_archive(frozenset())
    assert packed == [OPTIONAL] * 2
