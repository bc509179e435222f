"""Unpacking the user's code: it must be the archive that was submitted, and must stay in its folder."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from flk_runtime.launcher.processes.unpack import SetupError, unpack


def pieces(folder: Path, names: list[str], size: int = 100, link: str = "") -> str:
    """Write an archive of files with these names in pieces of ``size`` bytes, and return its hash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
        if link:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    data = buffer.getvalue()
    for number, start in enumerate(range(0, len(data), size)):
        (folder / f"code.tar.gz.{number:03}").write_bytes(data[start : start + size])
    return hashlib.sha256(data).hexdigest()


def test_pieces_are_joined_in_order_and_unpacked(tmp_path: Path) -> None:
    names = ["train.py", "package/__init__.py", "package/deep/model.py"]
    digest = pieces(tmp_path, names, size=10)
    assert len(list(tmp_path.glob("code.tar.gz.*"))) > 10
    target = tmp_path / "work"
    assert unpack(tmp_path, target, digest) == 3
    assert [(target / name).read_text() for name in names] == names
    assert unpack(tmp_path, target, digest) == 3  # as in a container that was restarted


def test_another_archive_is_refused(tmp_path: Path) -> None:
    pieces(tmp_path, ["train.py"])
    with pytest.raises(SetupError, match="was submitted"):
        unpack(tmp_path, tmp_path / "work", "0" * 64)
    assert not (tmp_path / "work").exists()


def test_missing_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ship").mkdir()
    with pytest.raises(SetupError, match="neither code"):
        unpack(tmp_path / "ship", tmp_path / "work", "")


def test_files_themselves_are_copied_if_they_are_those_that_were_submitted(tmp_path: Path) -> None:
    mounted = tmp_path / "mount" / "..2026" / "code"  # as Kubernetes mounts a ConfigMap
    (mounted / "package").mkdir(parents=True)
    (tmp_path / "mount" / "code").symlink_to("..2026/code")
    (mounted / "train.py").write_text("import package.model\n")
    (mounted / "package" / "model.py").write_text("")
    sums = subprocess.run(["sha256sum", "package/model.py", "train.py"], cwd=mounted, capture_output=True, check=True)
    digest = hashlib.sha256(sums.stdout).hexdigest()
    target = tmp_path / "work"
    with pytest.raises(SetupError, match="was submitted"):
        unpack(tmp_path / "mount" / "code", target, "0" * 64)
    assert not target.exists()
    assert unpack(tmp_path / "mount" / "code", target, digest) == 2
    assert unpack(tmp_path / "mount" / "code", target, digest) == 2  # as in a container that was restarted
    assert (target / "train.py").read_text() == "import package.model\n"
    assert (target / "package" / "model.py").read_text() == ""


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside-of-flk", "a/../../outside"])
def test_paths_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    digest = pieces(tmp_path, [name])
    with pytest.raises(SetupError, match="a link or a path outside its folder"):
        unpack(tmp_path, tmp_path / "work", digest)


@pytest.mark.parametrize("link", ["/etc/passwd", "../elsewhere", ".", "missing.py", "package"])
def test_links_to_anything_but_a_file_of_the_archive_are_refused(tmp_path: Path, link: str) -> None:
    digest = pieces(tmp_path, ["package/train.py"], link=link)
    with pytest.raises(SetupError, match="a link or a path outside its folder"):
        unpack(tmp_path, tmp_path / "work", digest)


def test_a_link_to_a_file_of_the_archive_is_one_in_the_pod(tmp_path: Path) -> None:
    digest = pieces(tmp_path, ["package/train.py"], link="package/train.py")
    for _ in range(2):  # as in a container that was restarted
        assert unpack(tmp_path, tmp_path / "work", digest) == 2
        assert (tmp_path / "work" / "link").resolve() == tmp_path / "work" / "package" / "train.py"
