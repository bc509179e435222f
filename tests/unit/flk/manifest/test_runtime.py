"""The runtime that travels with a job: what the job uses, as the sources have it, line by line."""

from __future__ import annotations

import ast
import io
import re
import zipfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import pytest

import flk_runtime
from flk.manifest import runtime
from flk.manifest.runtime import OPTIONAL, runtime_archive, stripped, used_by
from flk.spec.job import validated
from flk_runtime.bootstrap import decoded, modules

FOLDER = Path(flk_runtime.__path__[0])
SOURCES = sorted(FOLDER.rglob("*.py"))
LIMIT = 150_000  # bytes of a plain job
LIMIT_OF_MORE = 168_000  # of one that uses these parts
MORE = {"bench", "check", "diloco", "disk", "hosts", "page", "plan", "preparation", "records", "sinks"}


def members(archive: bytes) -> dict[str, str]:
    """The modules in an archive, by their paths in the package."""
    with zipfile.ZipFile(io.BytesIO(archive)) as outer:
        sources = modules(outer.read("flk_runtime.packed"))
    return {name.removeprefix("flk_runtime/"): source for name, source in sources.items()}


def names(tree: ast.AST) -> set[str]:
    """The names that a module reads or sets."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


class Needed(ast.NodeTransformer):
    """Takes away what only readers need: annotations but those of a class's fields, and the texts of documentation."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        before = names(node)
        for each in node.body:
            if isinstance(each, ast.Assign) and getattr(each.targets[0], "id", "") == "__all__":
                before -= set(ast.literal_eval(each.value))
        self.reads_all = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)].count("__all__") > 1
        self.generic_visit(node)
        unread = before - names(node)
        for each in node.body:
            if isinstance(each, ast.Import | ast.ImportFrom):
                each.names = [one for one in each.names if (one.asname or one.name.split(".")[0]) not in unread]
        node.body = [each for each in node.body if getattr(each, "names", True)]
        return node

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
            getattr(node, "lineno", 0) if type(node) is not ast.alias else node.name,
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
    "imports of names that only annotations have": (
        "import a\nimport b.c\nfrom d import (\n    e,\n    f as g,\n    h,\n)\ndef i(j: a.b, k: e = h) -> b.d:\n"
        "    l: g = e\n",
        "\n\nfrom d import e, h\n\n\n\n\ndef i(j, k = h):\n    l = e\n",
    ),
    "imports of names that code or a field has too": (
        "import a\nfrom b import c, d\nclass A:\n    x: c\ndef e(f: a, g: d): a()\n",
        "import a\nfrom b import c\nclass A:\n    x: c\ndef e(f, g): a()\n",
    ),
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


@pytest.mark.parametrize(
    "text",
    [
        "FLK_LEASE FLK_lease Ab ABc aBC A A_ _A _ AB1 A1b Aé ÉA self selfself.Self SELF_x",
        '{"a": "b\\n\\"\\u0001\\u2026"} \\1 \\2 ~^`$',
        "".join(map(chr, range(32, 127))),
        "".join(map(chr, range(126, 31, -1))),
    ],
)
def test_a_text_is_the_same_after_it_was_coded(text: str) -> None:
    text = text.encode("ascii", "ignore").decode()
    assert decoded(runtime._coded(text), runtime._SYMBOLS) == text


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


def test_every_module_has_the_names_that_others_import_from_it() -> None:
    sources = {
        name.removesuffix("/__init__.py").removesuffix(".py"): text for name, text in members(runtime_archive()).items()
    }
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flk_runtime."):
                module = (node.module or "").removeprefix("flk_runtime.").replace(".", "/")
                there = set(re.findall(r"\w+", sources[module]))
                missing = {each.name for each in node.names if f"{module}/{each.name}" not in sources} - there
                assert not missing, (name, module)


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
    "hosts": ({"command": ["-m", "flk_runtime.hosts.torchtitan"]}, {"training", "hosts", "loops"}),
    "plan": ({"command": ["-m", "flk_runtime.plan", "train.py"]}, {"plan"}),
    "check": ({"command": ["-m", "flk_runtime.check"]}, {"training", "check"}),
    "runtime": ({"command": ["-m", "flk_runtime", "check"]}, {"training", "check"}),
    "records": (
        {"records": "flk-records", "strategy": "auto", "pip": ["a"]},
        {"training", "plan", "records", "preparation"},
    ),
    "sinks": ({"metrics": "wandb"}, {"training", "sinks"}),
    "implied sinks": ({"env": {"MLFLOW_TRACKING_URI": "http://mlflow:5000"}}, {"training", "sinks"}),
    "a sink's key alone": ({"secrets": {"WANDB_API_KEY": "wandb:key"}}, {"training"}),
    "metrics page": ({"env": {"FLK_METRICS_PORT": "9400"}}, {"training", "page"}),
    "disk": ({"memory_path": "/nvme"}, {"training", "disk"}),
    "other module": ({"command": ["-m", "plan.bench"], "strategy": "auto"}, {"training", "plan"}),
}


@pytest.mark.parametrize(("fields", "expected"), JOBS.values(), ids=JOBS.keys())
def test_a_job_ships_the_packages_that_it_uses_and_no_others(fields: dict[str, Any], expected: set[str]) -> None:
    used = used_by(validated({"command": "train.py", **fields}))
    assert used == expected
    assert len(runtime_archive(used)) <= (LIMIT_OF_MORE if used & MORE else LIMIT)


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
