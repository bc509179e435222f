"""The runtime that travels with a job: all modules, without comments and docstrings, on the same lines."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import flk_runtime
from flk.manifest import runtime
from flk.manifest.runtime import runtime_archive, stripped
from flk_runtime.system.archive import modules

FOLDER = Path(flk_runtime.__path__[0]).parent
SOURCES = sorted(FOLDER.glob("flk_*/**/*.py"))  # the core, and its extensions
LIMIT = 300_000  # bytes: a ConfigMap takes 1 MiB, and Helm's Secret of a release has the archive twice


def members(archive: bytes) -> dict[str, str]:
    """The modules in an archive, by their paths."""
    with zipfile.ZipFile(io.BytesIO(archive)) as outer:
        return modules(outer.read("flk_runtime.json.bz2"))


def test_all_modules_travel_in_an_archive_that_a_config_map_can_hold() -> None:
    archive = runtime_archive()
    assert members(archive).keys() == {path.relative_to(FOLDER).as_posix() for path in SOURCES}
    assert len(archive) < LIMIT


def does(code: CodeType) -> list[Any]:
    """The instructions of a code object with their lines, and what they take, also of all functions in it."""
    constants = [does(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code, [*code.co_lines()], code.co_names, code.co_varnames, code.co_freevars, constants]


def compiled(source: str) -> list[Any]:
    """What a source does. Without docstrings, which none of its instructions reads."""
    return does(compile(source, "module", "exec", dont_inherit=True, optimize=2))


@pytest.mark.promise("Jobs: A script runs without an image build, since code and runtime travel with the job")
def test_each_module_does_the_same_on_the_same_lines() -> None:
    for path in SOURCES:
        source = path.read_text()
        assert compiled(stripped(source)) == compiled(source), path


def test_comments_and_docstrings_are_left_out_and_texts_are_kept() -> None:
    source = '''"""A module
of two lines."""  # noqa

X = "# no comment"  # a comment
"""An attribute."""


class Y:
    """Y."""

    def z(self):
        """é."""; return """# é
        """  # é
'''
    assert (
        stripped(source)
        == '''""

\nX = "# no comment"
""


class Y:
    ""

    def z(self):
        ""; return """# é
        """
'''
    )


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the archive is kept, of two modules: in a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    two = [FOLDER / "flk_runtime" / name for name in ("system/archive.py", "errors.py")]
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: two)
    return tmp_path / "flk" / "runtime"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of modules of each archive that is packed from now on."""
    calls: list[int] = []
    pack = runtime._packed

    def counted(modules: Mapping[str, bytes]) -> bytes:
        calls.append(len(modules))
        return pack(modules)

    monkeypatch.setattr(runtime, "_packed", counted)
    return calls


def test_an_archive_is_packed_once_for_the_same_sources(kept: Path, packed: list[int]) -> None:
    assert runtime_archive() == runtime_archive()
    assert packed == [2]
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other sources", "unreadable"])
def test_an_archive_that_is_not_what_it_should_be_is_packed_anew(
    kept: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    archive = runtime_archive()
    content = kept.read_bytes()
    if damage == "cut":
        kept.write_bytes(content[:-1])
    elif damage == "changed":
        kept.write_bytes(content[:-1] + b"x")
    elif damage == "empty":
        kept.write_bytes(b"")
    elif damage == "other sources":
        monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [FOLDER / "flk_runtime" / "system" / "archive.py"])
    else:
        kept.unlink()
        kept.mkdir()
    packed.clear()
    again = runtime_archive()
    assert packed == [1 if damage == "other sources" else 2]
    assert (again == archive) == (damage != "other sources")
