"""The page of the structure names every function and value of torch that the runtime replaces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from flk_runtime.parallel import between_passes

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime"
OF_TORCH = {"c10d"}  # parameters that hold a module of torch


def root(node: ast.expr) -> str:
    """The name that an expression such as ``name.attribute[key]`` begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target of an assignment, with the value of the whole assignment."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    yield each, node.value


def replaced(tree: ast.AST) -> set[str]:
    """The attributes of torch's modules and classes to which a module of flk assigns."""
    names = set(OF_TORCH)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or "torch" for each in node.names if each.name.partition(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {each.asname or each.name for each in node.names}
    for target, value in assignments(tree):  # such as autograd = torch.autograd
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and root(value) in names:
            names.add(target.id)
    found = set()
    for target, _ in assignments(tree):
        if isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and root(target) in names:
            found.add(target.attr)
    return found


def test_the_page_of_the_structure_names_what_is_replaced() -> None:
    page = (ROOT / "docs" / "contributing" / "structure.md").read_text()
    table = page.partition("| module | what it replaces |\n| --- | --- |\n")[2].partition("\n\n")[0]
    said = {}
    for line in table.splitlines():
        module, *names = re.findall(r"`([\w.]+)`", line)
        said[module] = set(names)
    true = {}
    for path in RUNTIME.rglob("*.py"):
        if names := replaced(ast.parse(path.read_text())):
            true[".".join(path.relative_to(RUNTIME.parent).with_suffix("").parts)] = names
    true[between_passes.__name__] = set(between_passes.BETWEEN_PASSES._attributes)  # it sets them in a loop
    assert true == said
