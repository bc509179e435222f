"""The runtime replaces no part of torch, and one module has all of torch's private names that it uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime"  # the core and its extensions
OF_TORCH = {"c10d"}  # parameters that hold a module of torch
PRIVATE = RUNTIME / "flk_runtime" / "system" / "torch_private.py"
TOOLS = RUNTIME / "flk_plan"  # it runs apart from trainings


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """The modules that ranks import, and their trees."""
    for path in sorted(RUNTIME.rglob("*.py")):
        if not path.is_relative_to(TOOLS):
            yield path, ast.parse(path.read_text())


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


def names_of_torch(tree: ast.AST) -> set[str]:
    """The names in a module that are torch's modules, classes and functions."""
    names = set(OF_TORCH)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or "torch" for each in node.names if each.name.partition(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {each.asname or each.name for each in node.names}
    for target, value in assignments(tree):  # such as autograd = torch.autograd
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and root(value) in names:
            names.add(target.id)
    return names


def replaced(tree: ast.AST) -> set[str]:
    """The attributes of torch's modules and classes that a module of flk sets or deletes."""
    names = names_of_torch(tree)
    found = set()
    for target, _ in assignments(tree):
        if isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and root(target) in names:
            found.add(target.attr)
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id in ("setattr", "delattr") and root(node.args[0]) in names:
            found.add(ast.unparse(node))
    return found


def private(tree: ast.AST) -> set[str]:
    """The private names of torch that a module of flk imports, or reads of what it has imported."""
    names, found = names_of_torch(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute) and root(node) in names:
            imported = [f"torch.{node.attr}"]
        else:
            continue
        found |= {each for each in imported if re.match(r"torch\.(.*\.)?_[a-z]", each)}
    return found


def test_what_is_replaced_and_what_is_private_is_found() -> None:
    tree = ast.parse("import torch.distributed as dist\ndist.init = 1\nsetattr(dist, 'a', 2)\ndist._world.x\n")
    assert replaced(tree) == {"init", "setattr(dist, 'a', 2)"}
    assert private(tree) == {"torch._world"}
    assert private(ast.parse("from torch.utils._python_dispatch import Mode")) == {"torch.utils._python_dispatch.Mode"}


def test_no_module_that_ranks_import_replaces_a_part_of_torch() -> None:
    assert {path.relative_to(RUNTIME).as_posix(): names for path, tree in modules() if (names := replaced(tree))} == {}
    page = (ROOT / "docs" / "contributing" / "structure.md").read_text()
    assert "A training process replaces no part of torch" in page


def test_private_names_of_torch_are_in_one_module_with_reasons() -> None:
    found = {path.relative_to(RUNTIME).as_posix(): private(tree) for path, tree in modules() if path != PRIVATE}
    assert {path: names for path, names in found.items() if names} == {}
    for node in ast.parse(PRIVATE.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            assert re.search(r"May go when|May go with|torch documents", ast.get_docstring(node) or ""), node.name
