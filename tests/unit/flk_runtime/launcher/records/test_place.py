"""The folder on a volume in which a job's record outlives its pods. The ConfigMap is in `test_record_archive`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.contract.failure import Kind
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.records.archive import Folder
from flk_runtime.launcher.records.writer import RecordWriter
from flk_runtime.launcher.settings import Settings

RUNNING = [Attempt(4, 1e9, restarts=2, disruptions=6)]


def settings_of(folder: str, **variables: str) -> Settings:
    own: Mapping[str, str] = {
        user_env.JOB: "gpt",
        pod_env.JOB_UID: "uid-1",
        pod_env.RDZV_SECRET: "secret",
        user_env.CHECKPOINT: folder,
    }
    return Settings.from_environment(["train.py"], {**own, **variables})


def writer(settings: Settings) -> tuple[RecordWriter, list[str]]:
    lines: list[str] = []
    return RecordWriter(settings, lambda line: lines.append(line.decode()), lambda number: []), lines


@pytest.mark.promise("Recovery: Launchers that all die go on with the attempts of the job")
def test_new_launchers_go_on_with_the_attempts_of_those_that_were_killed_at_once(tmp_path: Path) -> None:
    """No launcher is left that knows the attempts, and the namespace keeps no records."""
    folder = tmp_path / "gpt"
    records, _ = writer(settings_of(str(folder)))
    assert records._kept
    assert records.former() == ([], False)
    records.write_running(RUNNING)
    assert records._kept
    records._kept.flush(60.0)
    later, lines = writer(settings_of(str(folder)))
    (attempt,), again = later.former()
    assert lines == [f"[pod 0] reading the record of the job in folder {folder}\n"]  # which may take for ever
    assert again
    assert attempt.failure
    assert (attempt.number, attempt.restarts, attempt.disruptions) == (4, 2, 6)
    assert attempt.failure.kind is Kind.CONTAINER_KILLED
    later, _ = writer(settings_of(str(folder), **{pod_env.JOB_UID: "uid-2"}))
    assert later.former() == ([], False)
    created_again = settings_of(str(folder), **{pod_env.JOB_UID: "uid-2", pod_env.RESTARTED: "yes"})
    assert writer(created_again)[0].former() == ([], True)
    later.write_running(RUNNING)
    assert later._kept
    later._kept.flush(60.0)
    assert os.listdir(folder) == [".flk-record.json"]


@pytest.mark.parametrize(
    ("folder", "variables"),
    [
        ("s3://bucket/gpt", {}),
        (pod_layout.CHECKPOINT_FOLDER, {}),  # it goes with the pod
        ("", {}),
        ("/checkpoints/gpt", {pod_env.JOB_UID: ""}),
        ("/checkpoints/gpt", {pod_env.PARENT: "1"}),  # `flk run`
    ],
)
def test_no_record_is_kept_where_it_would_be_lost_or_taken_for_another_jobs(
    folder: str, variables: dict[str, str]
) -> None:
    assert not writer(settings_of(folder, **variables))[0]._kept


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    records, lines = writer(settings_of(str(tmp_path / "file" / "gpt")))
    records.write_running(RUNNING)
    assert records._kept
    records._kept.flush(60.0)
    (told,) = [line for line in lines if "is not kept" in line]
    assert told.startswith(f"[pod 0] the record of the job is not kept in folder {tmp_path}/file/gpt: [Errno 20] Not a")


def test_a_record_is_written_through_no_link_of_another_job(tmp_path: Path) -> None:
    """All jobs with this volume can write into the folder."""
    own = tmp_path / "own"
    own.write_text("precious")
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / ".flk-record.json.part").symlink_to(own)
    place = Folder(str(volume))
    place.write("gpt", "{}")
    assert (place.read("gpt"), own.read_text()) == ("{}", "precious")
    (volume / ".flk-record.json").write_text("x" * 10_000_000)
    assert len(place.read("gpt")) < 5_000_000
