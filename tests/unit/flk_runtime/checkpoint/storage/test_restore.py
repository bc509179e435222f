"""The checkpoint to resume from: what is damaged is noticed, said, and never a reason to lose progress."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flk_runtime.checkpoint.save.writer import StorageWriter
from flk_runtime.checkpoint.storage import manifest
from flk_runtime.checkpoint.storage.folder import FolderDestination
from flk_runtime.checkpoint.storage.manifest import (
    FORMAT,
    Manifest,
    StoredFile,
    pointer_text,
    read_pointer,
    step_name,
)
from flk_runtime.checkpoint.storage.restore import find_newest, open_destination
from flk_runtime.errors import MismatchError
from flk_runtime.shared.shard_file import ShardHeader

MANIFEST = Manifest(30, 2, {"__0_0.distcp": StoredFile(11, 22)}, {"job": "gpt", "torch": "2.13"})


def flips(content: bytes) -> Iterator[bytes]:
    """A content with each of its bits flipped."""
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def test_no_flipped_bit_of_a_manifest_changes_what_it_says() -> None:
    for damaged in flips(MANIFEST.to_json()):
        with contextlib.suppress(ValueError):
            assert Manifest.from_json(damaged) == MANIFEST


def test_a_manifest_of_a_newer_format_is_told_from_a_damaged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint is no substitute for one that a newer flk wrote."""
    data = json.loads(MANIFEST.to_json())
    with pytest.raises(ValueError, match="another checksum"):
        Manifest.from_json(json.dumps(data | {"format": FORMAT + 1}).encode())
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", FORMAT + 1)
        newer = MANIFEST.to_json()
    with pytest.raises(MismatchError, match=rf"wrote it in format {FORMAT + 1}, and .* reads formats up to {FORMAT};"):
        Manifest.from_json(newer)


def test_no_flipped_bit_of_the_pointer_names_another_step() -> None:
    for damaged in flips(pointer_text(30).encode()):
        with contextlib.suppress(ValueError):
            assert read_pointer(damaged) == 30
    assert read_pointer(b"step-000000020\n") == 20  # written by hand


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints after steps 20, 25 and 30."""
    destination = FolderDestination(tmp_path)
    destination.token = "a"
    destination.prepare()
    destination.claim()
    for step in (20, 25, 30):
        with destination.create(step, "__0_0.distcp") as stream:
            stream.write(b"x" * step)
        files = {"__0_0.distcp": destination.measure_new(step, "__0_0.distcp")}
        destination.commit(step, Manifest(step, 1, files).to_json())
    return tmp_path


def newest(folder: Path, lines: list[str]) -> int | None:
    """The step of the checkpoint to resume from, after what is said of others."""
    found = find_newest(FolderDestination(folder), lines.append)
    return found and found.step


@pytest.mark.parametrize(
    ("pointer", "step", "said"),
    [
        (pointer_text(30), 30, ""),
        (None, 30, ""),
        (
            "step-000000010\n",
            30,
            "latest names step 10, of which there is no checkpoint; the newest whole",
        ),
        ("step-00000003p\n", 30, "latest is damaged: b'step-00000003p"),
        ("step-000000020\ndb9afbc2\n", 30, "latest is damaged"),
        ("", 30, "latest is damaged"),
        ("step-000000020\n", 20, "latest names step 20; the checkpoints of later steps, 30, 25, are not used"),
        (pointer_text(25), 25, "latest names step 25; the checkpoints of later steps, 30, are not used"),
    ],
)
def test_a_pointer_that_is_not_the_newest_whole_checkpoint_is_said_and_removes_nothing(
    folder: Path, pointer: str | None, step: int, said: str
) -> None:
    (folder / "latest").unlink() if pointer is None else (folder / "latest").write_text(pointer)
    lines: list[str] = []
    assert newest(folder, lines) == step
    assert len(lines) == bool(said)
    assert said in "".join(lines)
    assert FolderDestination(folder).steps() == [20, 25, 30]


def test_a_damaged_manifest_is_said_and_the_checkpoint_before_it_is_used(folder: Path) -> None:
    path = folder / step_name(30) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"world_size": 1', b'"world_size": 3'))
    lines: list[str] = []
    assert newest(folder, lines) == 25
    assert "skipping the damaged checkpoint" in lines[0]
    assert "step-000000030: manifest.json has another checksum" in lines[0]
    assert (folder / "step-000000030" / "__0_0.distcp").exists(), "it stays until a later save"


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(folder: Path) -> None:
    (folder / step_name(30)).rename(folder / step_name(40))
    (folder / "latest").unlink()
    lines: list[str] = []
    assert newest(folder, lines) == 25
    assert "step-000000040: its manifest.json is of step 30" in lines[0]


@pytest.mark.parametrize(("step", "left"), [(30, [25, 30]), (40, [25, 40]), (27, [25, 27, 30])])
def test_a_damaged_checkpoint_does_not_count_among_those_that_stay(folder: Path, step: int, left: list[int]) -> None:
    (folder / step_name(30) / "__0_0.distcp").write_bytes(b"y")
    destination = FolderDestination(folder)
    find_newest(destination, lambda text: None)
    store: Any = dist.HashStore()
    writer = StorageWriter(destination, 2, store, 0, 1, timeout=0.0)
    writer.write(ShardHeader(step, 1, 0, (), {}), ())
    assert destination.steps() == left
    writer.write(ShardHeader(41, 1, 0, (), {}), ())
    assert destination.steps() == [step, 41]
    assert not list(folder.glob(".step-*"))


def test_a_folder_stays_where_it_is_when_a_script_changes_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    destination = open_destination("runs/checkpoints")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    destination.prepare()
    assert (tmp_path / "runs" / "checkpoints").is_dir()
