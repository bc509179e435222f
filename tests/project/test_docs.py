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
from flk.cli import why
from flk.health import diagnose
from flk.spec.job import validated
from scripts.documentation import reference
from scripts.documentation.outputs import normalized
from scripts.documentation.pages import GENERATED, ROOT, all_pages, blocks, flk_commands
from tests.support import recorded

PAGES = all_pages()
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))
STRUCTURE = ROOT / "docs" / "contributing" / "structure.md"
PACKAGES = {
    "flk": ROOT / "operator_client" / "flk",
    **{folder.name: folder for folder in (ROOT / "runtime").glob("flk_*")},
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_blocks(page: Path) -> str:
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.text, "")
    return text


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)", without_blocks(page)):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def anchor(heading: str) -> str:
    """The anchor that the site and GitHub give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def test_anchors_of_links_are_headings() -> None:
    anchors = {
        page.resolve(): {anchor(line) for line in re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)}
        for page in PAGES
    }
    for page in PAGES:
        for target, name in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", without_blocks(page)):
            if not target.startswith(("http://", "https://")):
                found = anchors[(page.parent / target).resolve() if target else page.resolve()]
                assert name in found, f"{name_of(page)} links to {target}#{name}"


def test_a_file_that_a_page_includes_links_to_no_other_file() -> None:
    # Its links would lead elsewhere from the page, and `make docs` would fail.
    included = {name for page in PAGES for name in re.findall(r'^--8<-- "(.+)"$', page.read_text(), re.MULTILINE)}
    assert included
    for name in included:
        assert re.findall(r"\]\((?!https?://|#)(.+?)\)", without_blocks(ROOT / name)) == [], name


def test_named_tests_exist() -> None:
    for page in PAGES:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
            file = ROOT / path
            assert file.exists(), f"{name_of(page)} names {path}"
            assert not name or f"def {name}(" in file.read_text(), f"{name_of(page)} names {path}::{name}"


def test_commands_and_their_options_exist() -> None:
    for page in PAGES:
        for line in flk_commands(page):
            words = shlex.split(line)
            if not words[1].startswith("-"):
                check_options(words, f"{name_of(page)}: {line}")


def check_options(words: list[str], where: str) -> None:
    assert words[1] in cli.COMMANDS, where
    known = {option for parameter in cli.load(words[1]).params for option in parameter.opts + parameter.secondary_opts}
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    for word in own:
        if word.startswith("-"):
            assert word.partition("=")[0] in {*known, "--help", "-h"}, where


def test_job_files_in_the_documentation_are_valid() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "yaml" and "replicas:" in block.text and "apiVersion:" not in block.text:
                validated(yaml.safe_load(block.text))


def test_output_that_a_page_shows_is_produced_by_a_run() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console":
                assert block.key == "run", f"{name_of(page)}:{block.line}: a console block needs a run directive"
                assert block.value in ("local", "cluster"), f"{name_of(page)}:{block.line}: run: {block.value}"


PRINTED = """flk: job gpt is running, 2 of 2 pods
gpt
[rank 0] {"step": 10, "loss": 3.27}
[rank 1] ready after 3s
[rank 0] {"step": 20, "loss": 3.1}
[rank 0] again
[rank 0] again
[pod 0] attempt 1
[pod 0] keeps checkpoints
gpt-worker-0   0-1   Running   0   flk-worker   -
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("3.27", "2.5", True),
        ("3s", "1m4s", True),
        ("Running   0   flk-worker", "Failed   1   flk-worker2", True),
        ("[rank 1] ready after 3s\n[rank 0] {", "[rank 0] {", False),  # a line is missing
        ("[rank 0] again\n[rank 0] again\n", "[rank 0] again\n", False),
        ('"step": 10', '"step": 11', False),
        ("0-1", "0-3", False),
        ("[pod 0] attempt 1\n[pod 0] keeps checkpoints\n", "[pod 0] keeps checkpoints\n[pod 0] attempt 1\n", True),
        ("gpt\n[rank 0]", "[rank 0]", False),
    ],
)
def test_the_outputs_of_a_page_are_compared_line_by_line(old: str, new: str, same: bool) -> None:
    assert old in PRINTED
    assert (normalized(PRINTED.replace(old, new)) == normalized(PRINTED)) == same


BESIDE = ROOT / "docs" / "concepts" / "beside-kubectl.md"
RECORDED = {  # for each answer on the page, a job that a cluster has recorded, and its row in the table
    "ImageNotFound": ("image-missing", "an image that its registry does not have"),
    "PodRefused": ("limit-range", "a container larger than a LimitRange allows"),
    "ExceptionRaised": ("foreign-exception", "an exception in one of three ranks, plain Python"),
}


def without_names(answer: str, job: str, namespace: str) -> list[str]:
    """The lines of an answer of `flk why` without what is another job's own: names, times and numbers."""
    answer = answer.replace(job, "JOB").replace(namespace, "NAMESPACE")
    for pattern, name in (
        (r" \(\w+ ago\)", ""),
        (r" \(x\d+\)", ""),
        (r"[\w.-]+(?::\d+)?/[\w-]+:\d[\w.-]*", "IMAGE"),
        (r"\b\d+(?:Mi|Gi)\b", "SIZE"),
    ):
        answer = re.sub(pattern, name, answer)
    return answer.splitlines()


@pytest.mark.parametrize("code", RECORDED)
def test_the_answers_beside_kubectl_are_those_of_flk_why(code: str) -> None:
    (shown,) = (block.text for block in blocks(BESIDE) if block.text.startswith(f"{code}: "))
    name, row = RECORDED[code]
    view = recorded.load(recorded.FOLDER / f"{name}.json")
    said = without_names(why.text(diagnose(view), view.now), name, view.job["metadata"]["namespace"])
    for line, now in zip(without_names(shown, "train", "team"), said, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, line.split("…"))), now), f"{line} | {now}"
    assert re.findall(rf"^\| {row} \|.* (\d+) \|$", BESIDE.read_text(), re.MULTILINE) == [str(len(said))]


def test_every_guide_shows_output() -> None:
    for page in GUIDES:
        assert any(block.key == "run" for block in blocks(page)), name_of(page)


@pytest.mark.promise("Pages: What a page shows is what the commands print")
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
    named = re.findall(r"`(flk(?:_[a-z]+)?(?:\.(?!yaml)[a-z_]+)+)`", STRUCTURE.read_text())
    assert len(named) >= 20
    for name in named:
        package, *rest = name.split(".")
        path = PACKAGES[package].joinpath(*rest)
        assert path.is_dir() or path.with_suffix(".py").exists(), f"structure.md names {name}"
