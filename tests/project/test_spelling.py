"""Words of the documentation: no known misspelling, and a glossary whose terms the pages use."""

from __future__ import annotations

import re
import subprocess
import sys

from scripts.documentation.pages import ROOT, all_pages

GLOSSARY = ROOT / "docs" / "glossary.md"
CHECKED = (
    "*.md",
    "docs",
    "examples",
    "operator_client",
    "runtime",
    "scripts",
    "benchmarks",
    "docker",
    "k8s",
    "Makefile",
)


def test_no_word_is_misspelled() -> None:
    # pyproject.toml says which words are none.
    paths = [str(path.relative_to(ROOT)) for pattern in CHECKED for path in sorted(ROOT.glob(pattern))]
    done = subprocess.run([sys.executable, "-m", "codespell_lib", *paths], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_every_term_of_the_glossary_is_used() -> None:
    terms = re.findall(r"^(\S.*)\n:   ", GLOSSARY.read_text(), re.MULTILINE)
    assert len(terms) >= 20
    pages = [page for page in all_pages() if page not in (GLOSSARY, ROOT / "CHANGELOG.md")]
    text = " ".join(" ".join(page.read_text().lower().split()) for page in pages)
    for term in terms:
        for word in re.split(r", | \(", term.rstrip(")")):
            assert re.search(rf"\b{re.escape(word.lower())}(?:e?s)?\b", text), f"no page uses the term {word}"
