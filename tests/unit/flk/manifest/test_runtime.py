"""The runtime that travels with a job: what the job uses, minified."""

from __future__ import annotations

import ast
import io
import re
import zipfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import pytest

import flk_runtime
from flk.manifest import runtime
from flk.manifest.minify import minified
from flk.manifest.runtime import OPTIONAL, runtime_archive, used_by
from flk.spec.job import validated
from flk_runtime.bootstrap import decoded, modules

FOLDER = Path(flk_runtime.__path__[0])
SOURCES = sorted(FOLDER.rglob("*.py"))
LIMIT = 150_000  # bytes of a plain job
LIMIT_OF_MORE = 169_000  # of one that uses these parts
MORE = {
    "bench", "check", "diloco", "disk", "gpus", "hosts", "links", "page", "plan", "preparation", "records", "s3",
    "sinks", "mesh", "weights", "recompute"
}  # fmt: skip


def members(archive: bytes) -> dict[str, str]:
    """The modules in an archive, by their paths in the package."""
    with zipfile.ZipFile(io.BytesIO(archive)) as outer:
        sources = modules(outer.read("flk_runtime.packed"))
    return {name.removeprefix("flk_runtime/"): source for name, source in sources.items()}


@pytest.mark.parametrize(
    "text",
    [
        "FLK_LEASE FLK_lease Ab ABc aBC A A_ _A _ AB1 A1b Aé ÉA self selfself.Self SELF_x",
        '{"a": "b\\n\\"\\u0001\\u2026"} \\1 \\2 ~^`$',
        "".join(map(chr, range(32, 127))),
        "".join(map(chr, range(126, 31, -1))),
    ],
)
def test_a_text_is_the_same_after_it_was_coded(text: str) -> None:
    text = text.encode("ascii", "ignore").decode()
    assert decoded(runtime._coded(text), runtime._SYMBOLS) == text


def test_a_plain_job_ships_nothing_that_it_does_not_use() -> None:
    archive = runtime_archive(used_by(validated({"command": "train.py"})))
    found = members(archive)
    assert not {name for name in found if name.partition("/")[0] in OPTIONAL}
    assert not {"launcher/hub.py", "launcher/preparation.py"} & found.keys()
    assert "launcher/hub.py" in members(runtime_archive({"diloco"}))
    assert "launcher/ledger.py" in found
    assert (
        not {"launcher/ledger.py", "launcher/replication/service.py"}
        & members(runtime_archive({"bench", "plan"})).keys()
    )
    assert members(runtime_archive()) == {
        path.relative_to(FOLDER).as_posix(): minified(path.read_text())
        for path in SOURCES
        if path.name != "bootstrap.py" or path.parent != FOLDER
    }
    assert archive == runtime_archive({"training"})


@pytest.mark.parametrize("others", [{"plan"}, {"mesh"}, {"plan", "mesh"}], ids=["plan", "mesh", "both"])
def test_a_module_of_a_package_that_needs_another_ships_with_both_only(others: set[str]) -> None:
    assert runtime._is_shipped("plan/split.py", OPTIONAL - others) is (others == {"plan", "mesh"})


def test_every_module_has_the_names_that_others_import_from_it() -> None:
    sources = {
        name.removesuffix("/__init__.py").removesuffix(".py"): text for name, text in members(runtime_archive()).items()
    }
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flk_runtime."):
                module = (node.module or "").removeprefix("flk_runtime.").replace(".", "/")
                there = set(re.findall(r"\w+", sources[module]))
                missing = {each.name for each in node.names if f"{module}/{each.name}" not in sources} - there
                assert not missing, (name, module)


PLANS = {"plan", "recompute", "sharding"}
JOBS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({}, {"training"}),
    "shards": ({"strategy": "full_shard"}, {"training", "sharding"}),
    "shards in an argument": ({"command": ["train.py", "--how=FULL_SHARD"]}, {"training", "sharding"}),
    "auto": ({"strategy": "auto"}, {"training", *PLANS}),
    "diloco": ({"strategy": "diloco"}, {"training", "diloco", "average"}),
    "diloco with shards": (
        {"strategy": "diloco", "diloco": {"inner": "full_shard"}},
        {"training", "diloco", "average", "sharding"},
    ),
    "packages": ({"pip": ["a"], "strategy": "auto"}, {"training", *PLANS, "preparation"}),
    "requirements": (
        {"requirements": "/r.txt", "strategy": "diloco"},
        {"training", "diloco", "average", "preparation"},
    ),
    "setup": ({"setup": "true", "command": ["-m", "flk_runtime.check"]}, {"training", "check", "preparation"}),
    "bench": ({"command": ["-m", "flk_runtime.bench", "{}", "train.py"]}, {"bench", *PLANS}),
    "hub": ({"command": ["-m", "flk_runtime.diloco", "--listen", ":29401"]}, {"diloco"}),
    "hub's module": ({"command": ["-m", "flk_runtime.diloco.__main__"]}, {"diloco"}),
    "hosts": ({"command": ["-m", "flk_runtime.hosts.torchtitan"]}, {"training", "hosts", "loops", "sharding"}),
    "plan": ({"command": ["-m", "flk_runtime.plan", "train.py"]}, PLANS),
    "check": ({"command": ["-m", "flk_runtime.check"]}, {"training", "check"}),
    "check of shards": ({"command": ["-m", "flk_runtime.check"], "strategy": "full_shard"}, {"training", "check"}),
    "runtime": ({"command": ["-m", "flk_runtime", "check"]}, {"training", "check", "weights"}),
    "records": (
        {"records": "flk-records", "strategy": "auto", "pip": ["a"]},
        {"training", *PLANS, "records", "preparation"},
    ),
    "sinks": ({"metrics": "wandb"}, {"training", "sinks"}),
    "implied sinks": ({"env": {"MLFLOW_TRACKING_URI": "http://mlflow:5000"}}, {"training", "sinks"}),
    "a sink's key alone": ({"secrets": {"WANDB_API_KEY": "wandb:key"}}, {"training", "s3", "sharding"}),
    "s3": ({"checkpoint": "s3://bucket/run"}, {"training", "s3"}),
    "s3 in a variable": ({"env": {"TO": "s3://bucket/run"}}, {"training", "s3"}),
    "s3 after a restart": ({"on_restart": "--from s3://bucket/run"}, {"training", "s3"}),
    "an image of this name": ({"image": "team/s3:1"}, {"training"}),
    "s3 in an argument": ({"command": ["train.py", "--to=s3://bucket/run"]}, {"training", "s3"}),
    "an option in an argument": ({"command": ["train.py", "+parallel.recompute=true"]}, {"training", "recompute"}),
    "options of two words": ({"command": ["train.py", "--tp", "2", "--init", "/w"]}, {"training", "mesh", "weights"}),
    "options in a variable": (
        {"env": {"OPTIONS": '{"save_frozen": false, "tp": 2}'}},
        {"training", "frozen", "mesh"},
    ),
    "an option after a restart": ({"on_restart": "--init /w --fast"}, {"training", "weights"}),
    "words that only resemble options": (
        {"command": ["train.py", "--reinit", "--smtp=a"], "env": {"SERVER": "http://a", "HOW": "__init__: 1"}},
        {"training"},
    ),
    "export": ({"command": ["-m", "flk_runtime", "export", "/a", "/b"]}, {"training", "check", "weights"}),
    "metrics page": ({"env": {"FLK_METRICS_PORT": "9400"}}, {"training", "page"}),
    "disk": ({"memory_path": "/nvme"}, {"training", "disk"}),
    "volume": ({"checkpoint": "claim:/checkpoints"}, {"training", "records"}),
    "GPUs": ({"resources": {"gpu": 1}}, {"training", "gpus"}),
    "three pods": ({"replicas": 3}, {"training", "links"}),
    "other module": ({"command": ["-m", "plan.bench"], "strategy": "auto"}, {"training", *PLANS}),
}


@pytest.mark.parametrize(("fields", "expected"), JOBS.values(), ids=JOBS.keys())
def test_a_job_ships_the_packages_that_it_uses_and_no_others(fields: dict[str, Any], expected: set[str]) -> None:
    used = used_by(validated({"command": "train.py", **fields}))
    assert used == expected
    assert len(runtime_archive(used)) <= (LIMIT_OF_MORE if used & MORE else LIMIT)


FEW = ["bootstrap.py", "errors.py", "plan/__init__.py", "bench/__init__.py", "diloco/__init__.py"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the archive of a plain job is kept, of FEW modules: in a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [folder / name for name in FEW])
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
    assert packed == [OPTIONAL, OPTIONAL - {"plan"}, frozenset()]
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
        monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [folder / name for name in FEW[:1]])
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
