"""A minified module of flk_runtime does the same as its source, on the same lines."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import flk_runtime
from flk.manifest.minify import minified, stripped

FOLDER = Path(flk_runtime.__path__[0])
SOURCES = sorted(FOLDER.rglob("*.py"))


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


def in_functions(node: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """The nodes below a node, each with the outermost function that it is in."""
    for child in ast.iter_child_nodes(node):
        outermost = function or (child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else None)
        yield child, outermost
        yield from in_functions(child, outermost)


def content(node: ast.AST) -> list[Any]:
    """What a node says itself, without the names of variables."""
    values = [] if isinstance(node, ast.Name) else [value for _, value in ast.iter_fields(node)]
    return [type(node), getattr(node, "lineno", 0), *(each for each in values if not isinstance(each, ast.AST | list))]


def scopes(table: symtable.SymbolTable, new: Mapping[int, Mapping[str, str]], function: int = 0) -> list[Any]:
    """How each scope uses each variable, with the names that ``new`` gives, by the line of the outermost function."""
    if not function and table.get_type() == "function":
        function = table.get_lineno()
    names = {**new.get(0, {}), **new.get(function, {})}
    symbols = {
        names.get(each.get_name(), each.get_name()): [each.is_parameter(), each.is_global(), each.is_free()]
        for each in table.get_symbols()
    }
    return [symbols, *(scopes(child, new, function) for child in table.get_children())]


def check_short_names(path: Path, before: str, after: str) -> None:
    """Fail if a module with short names does not have those of the same variables."""
    new: dict[int, dict[str, str]] = {}
    for (old, function), (short, _) in zip(
        in_functions(ast.parse(before)), in_functions(ast.parse(after)), strict=True
    ):
        assert content(short) == content(old), path
        if isinstance(old, ast.Name) and isinstance(short, ast.Name):
            names = new.setdefault(getattr(function, "lineno", 0), {})
            assert names.setdefault(old.id, short.id) == short.id, path
    used = scopes(symtable.symtable(before, "", "exec"), new)
    assert scopes(symtable.symtable(after, "", "exec"), {}) == used, path


def test_each_module_does_the_same_on_the_same_lines_with_the_same_variables() -> None:
    for path in SOURCES:
        source = path.read_text()
        before = stripped(source)
        assert tree(before) == tree(source), path
        check_short_names(path, before, minified(source))


SHORT = {
    "locals": (
        "def f(path, *, size=None):\n    text = size\n    for line in text: g(line=line)\n"
        "    return [text for text in path]\n",
        "def f(path,*,size=None):\n    a=size\n    for b in a:g(line=b)\n    return[a for a in path]\n",
    ),
    "names of inner functions": (
        "def f():\n    first = 1\n    def inner(second):\n        nonlocal first\n        third = first\n",
        "def f():\n    first=1\n    def inner(second):\n        nonlocal first\n        a=first\n",
    ),
    "names that the module has too": (
        "first = 1\ndef f(a=first):\n    first, list, b = a, 2, 3\n    other = b\n",
        "first=1\ndef f(a=first):\n    first,list,b=a,2,3\n    c=b\n",
    ),
    "f-strings": (
        "def f():\n    name, word = 1, 2\n    return f'{{name}} {name:{word}} name'\n",
        "def f():\n    a,b=1,2\n    return f'{{name}} {a:{b}} name'\n",
    ),
    "f-strings beside others that only look so": (
        "def f():\n    name, word = 1, 2\n    return f'{name}{word}' 'and {name}'\n",
        "def f():\n    name,a=1,2\n    return f'{name}{a}' 'and {name}'\n",
    ),
    "f-strings whose fields have other words": (
        "def f():\n    name = 1\n    return f'{g(name=name)}'\n",
        "def f():\n    name=1\n    return f'{g(name=name)}'\n",
    ),
    "attributes of a class": (
        "def f():\n    class A:\n        first = 1\n    second = A.first\n",
        "def f():\n    class A:\n        first=1\n    a=A.first\n",
    ),
    "locals()": ("def f(a):\n    first = locals()\n", "def f(a):\n    first=locals()\n"),
    "private constants": (
        "_LIMIT = 3\n_count = 1\ndef f():\n    local = _LIMIT + _count\n",
        "_A=3\n_count=1\ndef f():\n    a=_A+_count\n",
    ),
    "a private constant that a function sets": (
        "_STATE = 3\ndef f():\n    global _STATE\n    _STATE = 4\n",
        "_STATE=3\ndef f():\n    global _STATE\n    _STATE=4\n",
    ),
    "strings and indents": (
        'if x:\n    f(\'a = b\', "c" \'d\', """e = f""" if g else - 1)\n',
        'if x:\n    f(\'a = b\',"c" \'d\',"""e = f""" if g else-1)\n',
    ),
}


@pytest.mark.parametrize(("source", "expected"), SHORT.values(), ids=SHORT.keys())
def test_names_and_spaces_are_short(source: str, expected: str) -> None:
    assert minified(source) == expected
