"""Links, tests, commands, options, job files and modules that the documentation names exist, and the generated pages
equal what the code gives."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

import flk
import flk_runtime
from flk import cli
from flk.spec.job import validated
from scripts.documentation import reference
from scripts.documentation.pages import GENERATED, ROOT, all_pages, blocks, flk_commands

PAGES = all_pages()
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))
STRUCTURE = ROOT / "docs" / "contributing" / "structure.md"
PACKAGES = {"flk": ROOT / "operator_client" / "flk", "flk_runtime": ROOT / "runtime" / "flk_runtime"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_blocks(page: Path) -> str:
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.text, "")
    return text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)", without_blocks(page)):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def anchor(heading: str) -> str:
    """The anchor that the site and GitHub give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


ANCHORS = {
    page.resolve(): {anchor(line) for line in re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)}
    for page in PAGES
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_anchors_of_links_are_headings(page: Path) -> None:
    for target, name in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", without_blocks(page)):
        if not target.startswith(("http://", "https://")):
            found = ANCHORS[(page.parent / target).resolve() if target else page.resolve()]
            assert name in found, f"{name_of(page)} links to {target}#{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_tests_exist(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        file = ROOT / path
        assert file.exists(), f"{name_of(page)} names {path}"
        assert not name or f"def {name}(" in file.read_text(), f"{name_of(page)} names {path}::{name}"


def test_only_pages_for_contributors_name_tests() -> None:
    for page in PAGES:
        if "contributing" not in page.parts and page.name != "CONTRIBUTING.md":
            assert not re.search(r"\btest_\w+", page.read_text()), f"{name_of(page)} names a test"


COMMANDS = [(name_of(page), line) for page in PAGES for line in flk_commands(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_and_their_options_exist(page: str, line: str) -> None:
    words = shlex.split(line)
    if words[1].startswith("-"):
        return
    assert words[1] in cli.COMMANDS, f"{page}: {line}"
    known = {option for parameter in cli.load(words[1]).params for option in parameter.opts + parameter.secondary_opts}
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    for word in own:
        if word.startswith("-"):
            assert word.partition("=")[0] in {*known, "--help", "-h"}, f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_job_files_in_the_documentation_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml" and "replicas:" in block.text and "apiVersion:" not in block.text:
            validated(yaml.safe_load(block.text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_output_that_a_page_shows_is_produced_by_a_run(page: Path) -> None:
    for block in blocks(page):
        if block.language == "console":
            assert block.key == "run", f"{name_of(page)}:{block.line}: a console block needs a run directive"
            assert block.value in ("local", "cluster"), f"{name_of(page)}:{block.line}: run: {block.value}"


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_every_guide_shows_output(page: Path) -> None:
    assert any(block.key == "run" for block in blocks(page))


@pytest.mark.parametrize("file", reference.FILES, ids=name_of)
def test_generated_files_equal_the_code(file: Path) -> None:
    assert file.read_text() == reference.FILES[file](), "`make docs` writes the file anew"


def test_the_api_pages_describe_every_public_name() -> None:
    for package, page, names in (
        ("flk", "client-api.md", dir(flk)),
        ("flk_runtime", "runtime-api.md", flk_runtime.__all__),
    ):
        named = set(re.findall(rf"^::: {package}\.(\w+)$", (GENERATED / page).read_text(), re.MULTILINE))
        public = {name for name in names if not name.startswith("__")}
        errors = {name for name in public if name.endswith("Error")} if "errors" in named else set()
        assert named - {"errors"} == public - errors


def test_nobody_is_told_to_install_from_an_index_what_is_not_published() -> None:
    # Anybody could publish another package under that name. README says when this has changed.
    assert "Neither package nor images are published" in (ROOT / "README.md").read_text()
    texts = [
        *PAGES,
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("operator_client/flk/**/*.py"),
        *ROOT.glob("runtime/**/*.py"),
    ]
    for path in texts:
        found = re.search(r"pip install( -\S+)* ['\"]?flk(?![\w./-])", path.read_text())
        assert found is None or path.name == "CHANGELOG.md", f"{name_of(path)}: {found and found[0]}"


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"`flk ([\w-]+)`", text)) >= set(cli.COMMANDS)


def test_modules_named_on_the_page_of_the_structure_exist() -> None:
    named = re.findall(r"`((?:flk|flk_runtime)(?:\.(?!yaml)[a-z_]+)+)`", STRUCTURE.read_text())
    assert len(named) >= 20
    for name in named:
        package, *rest = name.split(".")
        path = PACKAGES[package].joinpath(*rest)
        assert path.is_dir() or path.with_suffix(".py").exists(), f"structure.md names {name}"


def test_the_page_of_the_structure_names_every_package() -> None:
    named = set(re.findall(r"`((?:flk|flk_runtime)(?:\.(?!yaml)[a-z_]+)+)`", STRUCTURE.read_text()))
    for package, folder in PACKAGES.items():
        for entry in folder.iterdir():
            if (entry / "__init__.py").exists() and not entry.is_symlink():
                assert f"{package}.{entry.name}" in named, f"structure.md does not name {package}.{entry.name}"
