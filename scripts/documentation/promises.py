"""The page of promises, from the marks on the tests that show them: ``@pytest.mark.promise("Topic: sentence")``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.documentation.pages import ROOT

PAGE: Final = ROOT / "docs" / "contributing" / "promises.md"
TOPICS: Final = ("Jobs", "Clusters", "Causes", "Recovery", "Checkpoints", "Training", "Planning", "Extensions", "Pages")
INTRODUCTION: Final = """# Promises

What flk promises, each with the tests that show it. Each test fails if the code that it covers is broken. `make test`
leaves out the tests that are marked as soak here; `make soak` runs them. A test gets its promise by a mark:
`@pytest.mark.promise("Topic: sentence")`.
"""


@dataclass(frozen=True)
class Test:
    """A test, and what it promises."""

    file: str  # from the root of the repository
    name: str
    soak: bool
    promises: list[str]


def page() -> str:
    """The page: for each topic its promises, and for each promise its tests.

    Raises:
        ValueError: a promise has another topic than those of ``TOPICS``.
    """
    tests = list(marked(ROOT / "tests"))
    promises = dict.fromkeys(promise for test in tests for promise in test.promises)
    strange = [promise for promise in promises if promise.partition(": ")[0] not in TOPICS]
    if strange:
        raise ValueError(f"{strange[0]!r}: expected one of the topics {', '.join(TOPICS)}, a colon and a sentence")
    parts = [INTRODUCTION]
    for topic in TOPICS:
        parts.append(f"## {topic}\n")
        for promise in sorted(each for each in promises if each.startswith(f"{topic}: ")):
            shown = "".join(_item(test) for test in tests if promise in test.promises)
            parts.append(f"**{promise.partition(': ')[2]}.**\n\n{shown}")
    return "\n".join(parts)


def marked(folder: Path) -> Iterator[Test]:
    """The tests below a folder that have a promise, in the order of their files."""
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text()
        if "mark.promise(" not in text:
            continue
        module = ast.parse(text)
        soak = any("mark.soak" in ast.unparse(node) for node in module.body if _is_pytestmark(node))
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and (promises := list(_promises(node))):
                marks = map(ast.unparse, node.decorator_list)
                yield Test(str(path.relative_to(ROOT)), node.name, soak or "pytest.mark.soak" in marks, promises)


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]


def _promises(function: ast.FunctionDef) -> Iterator[str]:
    """The texts of a function's promises."""
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
            yield str(ast.literal_eval(mark.args[0]))


def _item(test: Test) -> str:
    return f"- `{test.file}::{test.name}`{' (soak)' if test.soak else ''}\n"
