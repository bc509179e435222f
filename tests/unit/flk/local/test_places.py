"""Where `flk run` installs packages, and which run has the folder of checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.local import places
from flk.local.machine import launcher_variables
from flk.local.places import checkpoints_of_this_run, memory, packages_folder
from flk.spec.job import validated


def test_flk_run_installs_anew_where_something_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = tmp_path / "python"
    python.write_text("")
    (tmp_path / "r.txt").write_text("a\n./w.whl\n")

    def folder(environ: dict[str, str], **fields: object) -> Path:
        job = validated({"command": "t.py", "requirements": "r.txt", **fields})
        return packages_folder(job, tmp_path, str(python), environ)

    seen = [folder({"HOME": "/a"})]
    assert folder({"HOME": "/b"}, setup="true") == seen[0]
    assert seen[0].is_relative_to(tmp_path / "cache")
    seen.append(folder({"PIP_INDEX_URL": "x"}))
    seen.append(folder({}, pip=["b"]))
    (tmp_path / "w.whl").write_text("wheel")
    seen.append(folder({}))
    (tmp_path / "r.txt").write_text("b\n")
    seen.append(folder({}))
    assert len({*seen}) == len(seen)
    assert not (tmp_path / "cache").exists()  # only who installs makes it
    monkeypatch.setenv("XDG_CACHE_HOME", str(python))
    needy = validated({"command": "t.py", "name": "n", "requirements": "r.txt"})
    with pytest.raises(UsageError) as caught:
        launcher_variables(needy, tmp_path, tmp_path, (str(python), ""), 1)
    assert (str(caught.value).endswith(" cannot be made (Not a directory)"), caught.value.hint) == (
        True,
        "set XDG_CACHE_HOME to a folder that you can write",
    )


@pytest.mark.promise("Checkpoints: Two writers of one place make one checkpoint, whole")
def test_two_runs_of_one_machine_do_not_save_in_one_folder(tmp_path: Path) -> None:
    """Each would take it from the other, and both would fail for ever."""
    first = validated({"command": "t.py", "name": "gpt", "checkpoint": "claim:/c"})
    with checkpoints_of_this_run(first, tmp_path):
        with pytest.raises(UsageError, match=r"another flk run trains gpt here, and saves in .*claim/gpt") as caught:
            checkpoints_of_this_run(first, tmp_path).__enter__()
        assert caught.value.hint == "wait until it has ended, or give this one another --name"
        for other in ({"name": "other"}, {"checkpoint": "other:/c"}, {"checkpoint": None}):
            with checkpoints_of_this_run(first.changed(**other), tmp_path):
                pass
    with checkpoints_of_this_run(first, tmp_path):
        pass


def test_the_memory_of_killed_runs_is_freed_and_that_of_others_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a run that has made its folder and has not locked it yet."""
    monkeypatch.setattr(places, "_SHM", tmp_path)
    killed = tmp_path / "flk-run-killed"
    killed.mkdir()
    (killed / "shard").touch()
    lock = places._locked
    monkeypatch.setattr(places, "_locked", lambda folder: lock(folder) if folder == killed else begin_both(folder))

    def begin_both(folder: Path) -> contextlib.AbstractContextManager[None]:
        monkeypatch.setattr(places, "_locked", lock)
        with memory():
            return lock(folder)

    with memory() as first:
        assert not killed.exists()
        [of_first] = map(Path, first.values())
        (of_first / "shard").touch()
        with memory():
            assert [*tmp_path.glob("*/*")] == [of_first / "shard"]
    assert not any(tmp_path.iterdir())
