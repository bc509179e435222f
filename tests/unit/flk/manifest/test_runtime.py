"""The runtime that travels with a job: what the job uses, as the sources have it, line by line."""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import pytest

import flk_runtime
from flk.manifest import runtime
from flk.manifest.runtime import OPTIONAL, runtime_archive, stripped, used_by
from flk.spec.job import validated
from flk_runtime.bootstrap import modules

FOLDER = Path(flk_runtime.__path__[0])
SOURCES = sorted(FOLDER.rglob("*.py"))
LIMIT = 150_000  # bytes
LIMIT_OF_MORE = 159_000  # of a job that plans its strategy itself, or has several optional parts


def members(archive: bytes) -> dict[str, str]:
    """The modules in an archive, by their paths in the package."""
    with zipfile.ZipFile(io.BytesIO(archive)) as outer:
        sources = modules(outer.read("flk_runtime.packed"))
    return {name.removeprefix("flk_runtime/"): source for name, source in sources.items()}


class Needed(ast.NodeTransformer):
    """Takes away what only readers need: annotations but those of a class's fields, and the texts of documentation."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.reads_all = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)].count("__all__") > 1
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        public = getattr(node.targets[0], "id", "") == "__all__" and not self.reads_all
        return None if public else self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if not node.decorator_list and [getattr(base, "id", "") for base in node.bases] == ["Protocol"]:
            target, value = ast.Name(node.name, ast.Store()), ast.Constant(0)
            return ast.copy_location(
                ast.Assign([ast.copy_location(target, node)], ast.copy_location(value, node)), node
            )
        node.body = [each if isinstance(each, ast.AnnAssign) else self.visit(each) for each in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node)) if node.value else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if getattr(node.test, "id", "") == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        place = {"Variable": 1, "Setting": 1, "Meaning": 0}.get(getattr(node.func, "id", ""))
        if place is not None:
            node.args[place] = ast.copy_location(ast.Constant(""), node.args[place])
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("annotation", "returns"):
            if hasattr(node, name):
                setattr(node, name, None)
        return super().generic_visit(node)


def tree(source: str) -> list[Any]:
    """What a module does: its syntax with the number of each line, without what only readers need."""
    return [
        (
            type(node).__name__,
            getattr(node, "lineno", 0),
            getattr(node, "value", "") if type(node) is ast.Constant else "",
        )
        for node in ast.walk(Needed().visit(ast.parse(source)))
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_a_module_does_the_same_on_the_same_lines(path: Path) -> None:
    source = path.read_text()
    assert tree(stripped(source)) == tree(source)


STRIPPED = {
    "comments and docstrings": (
        'def f():\n    """A docstring, # of\n    two lines."""\n    # a comment\n    g()  # yes\nX = 1\n"""Of X."""\n',
        'def f():\n    ""\n\n\n    g()\nX = 1\n""\n',
    ),
    "other strings": ('return_("# no", x("""\n"""), {1:\n"""y"""})', 'return_("# no", x("""\n"""), {1:\n"""y"""})'),
    "annotations": (
        "def f(a: int, *b: str, c: set[\n  int\n] = ()) -> list[\n  int\n]:\n    é: str = g('é', d=2)\n    e: int\n",
        "def f(a, *b, c\n\n = ()) -> list[\n  int\n]:\n    é = g('é', d=2)\n    e: int\n",
    ),
    "imports": ("import a\nif TYPE_CHECKING:\n    import b\n\n    c = 1\nd = 2", "import a\n\n\n\n\nd = 2"),
    "protocols": (
        "class A(Protocol):\n    def f(self) -> int: ...\n@runtime_checkable\nclass B(Protocol):\n    x: int\n",
        "A=0\n\n@runtime_checkable\nclass B(Protocol):\n    x: int\n",
    ),
    "lists of public names": ("__all__ = [\n    'A',\n]\nf()", "\n\n\nf()"),
    "a list of public names that is read": ("__all__ = ['A']\nf(__all__)", "__all__ = ['A']\nf(__all__)"),
    "coroutines": ("async def h(a: int) -> str: ...", "async def h(a): ..."),
    "fields of classes": (
        "class A:\n    x: int\n    y: int = 1\n    def m(self) -> int:\n        self.z: int = 2\n",
        "class A:\n    x: int\n    y: int = 1\n    def m(self):\n        self.z = 2\n",
    ),
    "documentation": (
        "A: Final = Setting(\n    'A', 'what it\\n'\n    'means', 1\n)\nB = {K: Meaning('what', reason='why')}\n",
        "A = Setting(\n    'A', \"\"\n, 1\n)\nB = {K: Meaning(\"\", reason='why')}\n",
    ),
}


@pytest.mark.parametrize(("source", "expected"), STRIPPED.values(), ids=STRIPPED.keys())
def test_what_only_readers_need_is_left_out(source: str, expected: str) -> None:
    assert stripped(source) == expected


def test_a_plain_job_ships_nothing_that_it_does_not_use() -> None:
    archive = runtime_archive(used_by(validated({"command": "train.py"})))
    found = members(archive)
    assert {name for name in found if name.partition("/")[0] in OPTIONAL} == {"diloco/__init__.py", "diloco/options.py"}
    assert not {"launcher/hub.py", "launcher/preparation.py"} & found.keys()
    assert "launcher/hub.py" in members(runtime_archive({"diloco"}))
    assert "launcher/ledger.py" in found
    assert (
        not {"launcher/ledger.py", "launcher/replication/service.py"}
        & members(runtime_archive({"bench", "plan"})).keys()
    )
    assert members(runtime_archive()) == {
        path.relative_to(FOLDER).as_posix(): stripped(path.read_text())
        for path in SOURCES
        if path.name != "bootstrap.py" or path.parent != FOLDER
    }
    assert archive == runtime_archive({"training"})


JOBS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({"strategy": "full_shard"}, {"training"}),
    "auto": ({"strategy": "auto"}, {"training", "plan"}),
    "diloco": ({"strategy": "diloco"}, {"training", "diloco"}),
    "packages": ({"pip": ["a"], "strategy": "auto"}, {"training", "plan", "preparation"}),
    "requirements": ({"requirements": "/r.txt", "strategy": "diloco"}, {"training", "diloco", "preparation"}),
    "setup": ({"setup": "true", "command": ["-m", "flk_runtime.check"]}, {"training", "check", "preparation"}),
    "bench": ({"command": ["-m", "flk_runtime.bench", "{}", "train.py"]}, {"bench", "plan"}),
    "hub": ({"command": ["-m", "flk_runtime.diloco", "--listen", ":29401"]}, {"diloco"}),
    "hub's module": ({"command": ["-m", "flk_runtime.diloco.__main__"]}, {"diloco"}),
    "plan": ({"command": ["-m", "flk_runtime.plan", "train.py"]}, {"plan"}),
    "check": ({"command": ["-m", "flk_runtime.check"]}, {"training", "check"}),
    "runtime": ({"command": ["-m", "flk_runtime", "check"]}, {"training", "check"}),
    "records": (
        {"records": "flk-records", "strategy": "auto", "pip": ["a"]},
        {"training", "plan", "records", "preparation"},
    ),
    "other module": ({"command": ["-m", "plan.bench"], "strategy": "auto"}, {"training", "plan"}),
}


@pytest.mark.parametrize(("fields", "expected"), JOBS.values(), ids=JOBS.keys())
def test_a_job_ships_the_packages_that_it_uses_in_at_most_150_kilobytes(
    fields: dict[str, Any], expected: set[str]
) -> None:
    used = used_by(validated({"command": "train.py", **fields}))
    assert used == expected
    needs_more = {"training", "plan"} <= used or {"diloco", "preparation"} <= used
    assert len(runtime_archive(used)) <= (LIMIT_OF_MORE if needs_more else LIMIT)


FEW = ["bootstrap.py", "errors.py", "plan/__init__.py", "bench/__init__.py", "diloco/__init__.py"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the archive of a plain job is kept, of FEW modules: in a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [folder / name for name in FEW])
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
    assert packed == [OPTIONAL, OPTIONAL - {"plan"}, frozenset()]
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
        monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [folder / name for name in FEW[:1]])
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
