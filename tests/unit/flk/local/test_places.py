"""Where `flk run` installs packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from flk.errors import UsageError
from flk.local.places import packages_folder
from flk.local.variables import launcher_variables
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
        launcher_variables(needy, tmp_path, tmp_path, (str(python), ""))
    assert (str(caught.value).endswith(" cannot be made (Not a directory)"), caught.value.hint) == (
        True,
        "set XDG_CACHE_HOME to a folder that you can write",
    )
