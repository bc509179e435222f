"""Checkpoints in a folder: the same step again, kills between two renames, and writers that were paused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.checkpoint.storage.folder import FolderDestination
from flk_runtime.checkpoint.storage.manifest import pointer_text
from flk_runtime.errors import MismatchError


class Killed(BaseException):
    """The process is killed: nothing that it would do afterwards happens."""


def writer(path: Path, token: str) -> FolderDestination:
    """A writer of a new attempt, which has begun to save."""
    destination = FolderDestination(path)
    destination.token = token
    destination.prepare()
    destination.claim()
    return destination


def write(destination: FolderDestination, step: int, content: bytes) -> None:
    """Write the files of a checkpoint, which is not completed."""
    with destination.create(step, "__0_0.distcp") as stream:
        stream.write(content)


def save(destination: FolderDestination, step: int, content: bytes) -> None:
    write(destination, step, content)
    destination.commit(step, content)


def content_of(path: Path, step: int) -> set[bytes]:
    """The contents of the files of a checkpoint."""
    destination = FolderDestination(path)
    destination.prepare()
    folder = path / f"step-{step:09d}"
    return {file.read_bytes() for file in folder.iterdir()} if step in destination.steps() else set()


def test_one_step_saved_twice_is_one_checkpoint(tmp_path: Path) -> None:
    destination = writer(tmp_path, "a")
    save(destination, 7, b"first")
    save(destination, 7, b"second")
    assert destination.steps() == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer-a", "latest", "step-000000007"]
    assert content_of(tmp_path, 7) == {b"second"}


def test_what_makes_a_checkpoint_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure there is no checkpoint under its name without its bytes."""
    destination, synced = writer(tmp_path, "a"), []

    def fsync(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size > 0
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", fsync)
    save(destination, 7, b"first")
    assert synced == ["__0_0.distcp", "manifest.json", "step-000000007", "latest", tmp_path.name, tmp_path.name]


@pytest.mark.promise("Checkpoints: Two writers of one place make one checkpoint, whole")
def test_a_kill_at_any_rename_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only one checkpoint is kept, which is the one that is replaced."""
    kills = 0
    for number in range(10):
        path = tmp_path / str(number)
        destination = writer(path, "a")
        save(destination, 7, b"first")
        write(destination, 7, b"second")
        calls = [0]

        def killed(old: Path, new: Path, calls: list[int] = calls, last: int = number, rename: Any = os.rename) -> None:
            calls[0] += 1
            if calls[0] > last:
                raise Killed
            rename(old, new)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", killed)
            patch.setattr(os, "replace", killed)
            try:
                destination.commit(7, b"second")
            except Killed:
                kills += 1
        content = content_of(path, 7)
        assert content in ({b"first"}, {b"second"}), number
        assert FolderDestination(path).latest() == pointer_text(7).encode()
    assert kills == 3, "the commit renames three times"


def test_a_writer_that_was_paused_completes_nothing_once_another_one_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = writer(tmp_path, "a")
    save(paused, 7, b"first")
    write(paused, 8, b"late")
    other = writer(tmp_path, "b")
    save(other, 7, b"again")
    save(other, 12, b"newer")
    with pytest.raises(MismatchError, match=f"another run saves in {tmp_path} since then"):
        paused.commit(8, b"late")
    with pytest.raises(MismatchError, match="another run saves in"):
        write(paused, 9, b"later")
    assert other.latest() == pointer_text(12).encode()
    assert other.steps() == [7, 12]


def test_a_writer_that_is_paused_before_it_moves_the_pointer_does_not_move_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = writer(tmp_path, "a")
    write(paused, 8, b"late")
    replace = Path.replace

    def pause(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        save(writer(tmp_path, "b"), 12, b"newer")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", pause)
    with pytest.raises(MismatchError, match="another run saves in"):
        paused.commit(8, b"late")
    assert paused.latest() == pointer_text(12).encode()


def test_a_folder_that_somebody_removes_is_named(tmp_path: Path) -> None:
    destination = writer(folder := tmp_path / "checkpoints", "a")
    save(destination, 7, b"first")
    write(destination, 8, b"late")
    shutil.rmtree(folder)
    with pytest.raises(OSError, match=f"{folder} was removed or emptied while the checkpoint was written"):
        destination.commit(8, b"late")


def test_a_run_that_only_reads_does_not_keep_another_from_saving(tmp_path: Path) -> None:
    destination = writer(tmp_path, "a")
    write(destination, 7, b"first")
    FolderDestination(tmp_path).prepare()
    destination.commit(7, b"first")
    assert content_of(tmp_path, 7) == {b"first"}


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    save(writer(tmp_path, "a"), 7, b"first")
    with pytest.raises(MismatchError, match="is a checkpoint, and not a folder of checkpoints: name the folder around"):
        FolderDestination(tmp_path / "step-000000007").prepare()
