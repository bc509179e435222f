"""The page of symptoms quotes messages that are printed, and messages name pages that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("operator_client/flk", "runtime/flk_runtime")
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


@pytest.fixture(scope="module")
def messages() -> str:
    """All texts of flk and of its tests, in lower case."""
    own = [text for folder in SOURCES for path in (ROOT / folder).rglob("*.py") for text in literals(path)]
    recorded = [path.read_text() for pattern in RECORDED for path in ROOT.glob(pattern)]
    return "\n".join(own + recorded).lower()


@pytest.mark.parametrize("quote", QUOTES)
def test_what_the_page_quotes_is_a_message_that_somebody_prints(quote: str, messages: str) -> None:
    assert quote.lower() in messages


def test_a_page_that_a_message_names_exists() -> None:
    named = {
        page
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for text in literals(path)
        for page in re.findall(r"docs/[\w/-]+\.md", text)
    }
    assert named
    for page in named:
        assert (ROOT / page).is_file(), page
