"""What the documentation says is there: links, tests, commands with their options, fields and job files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from flk import cli
from flk.spec.job import Job, validated

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("charts/**/*.md")]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", FENCE.sub("", page.read_text())):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_tests_exist(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        file = ROOT / path
        assert file.exists(), f"{name_of(page)} names {path}"
        assert not name or f"def {name}(" in file.read_text(), f"{name_of(page)} names {path}::{name}"


def commands() -> list[tuple[str, str]]:
    """Every flk command line in a code block of a page."""
    found = []
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language == "sh":
                for line in block.replace("\\\n", " ").splitlines():
                    if line.strip().startswith("flk "):
                        found.append((name_of(page), line.strip().partition("#")[0].strip()))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_and_their_options_exist(page: str, line: str) -> None:
    words = shlex.split(line)
    assert words[1] in cli.COMMANDS, f"{page}: {line}"
    known = {option for parameter in cli.load(words[1]).params for option in parameter.opts}
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    for word in own:
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{page}: {line}"


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `flk (\w+)` \|", text, re.MULTILINE)) == set(cli.COMMANDS)


def test_every_field_of_the_job_file_is_documented() -> None:
    text = (ROOT / "docs" / "job-file.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(Job.model_fields)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_job_files_in_the_documentation_are_valid(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text()):
        if language == "yaml" and "replicas:" in block:
            validated(yaml.safe_load(block))


def test_the_pages_are_found() -> None:
    assert len(PAGES) >= 8
    assert len(commands()) >= 8


def test_modules_named_on_the_page_of_the_structure_exist() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    named = re.findall(r"`(flk|flk_runtime)/(\w+)\.py`", text)
    assert len(named) >= 10
    for package, module in named:
        folder = "operator_client" if package == "flk" else "runtime"
        assert (ROOT / folder / package / f"{module}.py").exists(), f"{package}/{module}.py"
