"""flk's folders in the user's home are where the XDG specification has them."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from flk.user.files import cache_folder, state_folder, write_whole


@pytest.mark.parametrize(
    ("folder", "variable", "default"),
    [(state_folder, "XDG_STATE_HOME", ".local/state/flk"), (cache_folder, "XDG_CACHE_HOME", ".cache/flk")],
)
def test_folders_are_where_their_variable_says_unless_it_is_relative(
    monkeypatch: pytest.MonkeyPatch, folder: Callable[[], Path], variable: str, default: str
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv(variable, "/elsewhere")
    assert folder() == Path("/elsewhere/flk")
    for ignored in ("", "relative"):
        monkeypatch.setenv(variable, ignored)
        assert folder() == Path("/home/ada", default)


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "home" / "folder" / "file"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path.parent.parent)] == [0o700] * 2
