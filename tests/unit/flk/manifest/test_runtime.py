"""The runtime that travels with a job: what the job uses, as the sources have it, line by line."""

from __future__ import annotations

import ast
import io
import tarfile
import zipfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import pytest

import flk_runtime
from flk.manifest import runtime
from flk.manifest.runtime import OPTIONAL, runtime_archive, stripped, used_by
from flk.spec.job import validated

FOLDER = Path(flk_runtime.__path__[0])
SOURCES = sorted(FOLDER.rglob("*.py"))
LIMIT = 150_000  # bytes
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def members(archive: bytes) -> dict[str, str]:
    """The modules in an archive, by their paths in the package."""
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as outer,
        tarfile.open(fileobj=io.BytesIO(outer.read("flk_runtime.tar.bz2"))) as tar,
    ):
        files = [(member.name, tar.extractfile(member)) for member in tar.getmembers()]
        return {name.removeprefix("flk_runtime/"): file.read().decode() for name, file in files if file}


def tree(source: str) -> list[Any]:
    """What a module does: its syntax with the number of each line, but the texts of its docstrings."""
    module = ast.parse(source)
    docstrings = set()
    for node in ast.walk(module):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
    return [
        (
            type(node).__name__,
            getattr(node, "lineno", 0),
            getattr(node, "value", "") if type(node) is ast.Constant else "",
        )
        for node in ast.walk(module)
        if node not in docstrings
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_a_module_does_the_same_on_the_same_lines(path: Path) -> None:
    source = path.read_text()
    assert tree(stripped(source)) == tree(source)


def test_strings_and_what_looks_like_comments_in_them_stay() -> None:
    kept = 'return "# no", x("""\n"""), {1:\n"""y"""}'
    source = f'def f():\n    """A docstring, # of\n    two lines."""\n    # a comment\n    {kept}  # yes\n'
    expected = f'def f():\n    ""\n\n\n    {kept}\n'
    assert stripped(source) == expected


def test_a_plain_job_ships_at_most_150_kilobytes_and_nothing_that_it_does_not_use() -> None:
    archive = runtime_archive(used_by(validated({"command": "train.py"})))
    assert len(archive) <= LIMIT
    found = members(archive)
    assert {name for name in found if name.partition("/")[0] in OPTIONAL} == {"diloco/__init__.py", "diloco/options.py"}
    assert set(members(runtime_archive())) == {path.relative_to(FOLDER).as_posix() for path in SOURCES} - {
        "bootstrap.py"
    }
    assert archive == runtime_archive(frozenset())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"strategy": "auto"}, {"plan"}),
        ({"strategy": "diloco"}, {"diloco"}),
        ({"command": ["-m", "flk_runtime.bench", "{}", "train.py"]}, OPTIONAL),
        ({"command": ["-m", "flk_runtime.diloco", "--listen", ":29401"]}, OPTIONAL),
        ({"command": ["-m", "flk_runtime.check"]}, set()),
        ({"strategy": "full_shard"}, set()),
    ],
)
def test_a_job_ships_the_packages_that_it_uses(fields: dict[str, Any], expected: set[str]) -> None:
    assert used_by(validated({"command": "train.py", **fields})) == expected


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the archive of a plain job is kept: in a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flk" / "runtime"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Set[str]]:
    """The packages that were left out, for each archive that is packed from now on."""
    calls: list[Set[str]] = []
    pack = runtime._packed

    def counted(modules: Mapping[str, bytes], left_out: Set[str]) -> bytes:
        calls.append(left_out)
        return pack(modules, left_out)

    monkeypatch.setattr(runtime, "_packed", counted)
    return calls


def test_an_archive_is_packed_once_for_the_same_sources(kept: Path, packed: list[Set[str]]) -> None:
    choices: list[Set[str]] = [frozenset(), {"plan"}, OPTIONAL]
    first = [runtime_archive(optional) for optional in choices]
    assert [runtime_archive(optional) for optional in choices] == first
    assert packed == [OPTIONAL, {"bench", "diloco"}, frozenset()]
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other packages", "other sources", "unreadable"])
def test_an_archive_that_is_not_what_it_should_be_is_packed_anew(
    kept: Path, packed: list[Set[str]], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    archive, other = runtime_archive(frozenset()), runtime_archive({"plan"})
    content = kept.read_bytes()
    if damage == "cut":
        kept.write_bytes(content[:-1])
    elif damage == "changed":
        kept.write_bytes(content[:-1] + b"x")
    elif damage == "empty":
        kept.write_bytes(b"")
    elif damage == "other packages":
        kept.write_bytes(kept.with_name("runtime-plan").read_bytes())
    elif damage == "other sources":
        monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [folder / "bootstrap.py", folder / "errors.py"])
    else:
        kept.unlink()
        kept.mkdir()
    packed.clear()
    again = runtime_archive(frozenset())
    assert packed == [OPTIONAL]
    assert other != again
    assert (again == archive) == (damage != "other sources")


def test_without_a_folder_for_the_cache_an_archive_is_packed_each_time(kept: Path, packed: list[Set[str]]) -> None:
    kept.parent.write_text("a file, not a folder")
    assert runtime_archive(frozenset()) == runtime_archive(frozenset())
    assert packed == [OPTIONAL] * 2
