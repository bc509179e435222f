"""The page of symptoms quotes messages that are printed, and messages name pages that exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flk.health import CAUSES

pytestmark = pytest.mark.xdist_group("messages of flk")  # which are found once

ROOT = Path(__file__).parents[2]
SOURCES = ("operator_client/flk", "runtime")
# Whole outputs, and messages of Kubernetes, torch and the kernel as tests have them
RECORDED = ("tests/unit/**/*.py", "tests/support/*.py", "tests/cluster/*.py", "tests/local/*.py", "tests/**/*.ambr")
QUOTES = re.findall("“([^”]+)”", (ROOT / "docs" / "guides" / "symptoms.md").read_text())


def literals(path: Path) -> Iterator[str]:
    """The texts of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


@functools.cache
def own_messages() -> list[str]:
    """All texts of flk."""
    return [text for folder in SOURCES for path in (ROOT / folder).rglob("*.py") for text in literals(path)]


def test_what_the_page_quotes_is_a_message_that_somebody_prints() -> None:
    recorded = [path.read_text() for pattern in RECORDED for path in ROOT.glob(pattern)]
    messages = "\n".join(own_messages() + recorded).lower()
    assert QUOTES
    assert [quote for quote in QUOTES if quote.lower() not in messages] == []


def test_every_cause_stands_on_the_page() -> None:
    page = (ROOT / "docs" / "guides" / "symptoms.md").read_text()
    assert [cause.code for cause in CAUSES if f"causes.md#{cause.code.lower()})" not in page] == []
