"""`flk cp`: what arrives, and what a pod cannot make it write."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flk.errors import ApiError, FlkError, UnreachableError, UsageError
from flk.jobs import copying
from flk.kube.sockets import STDERR, STDOUT
from flk.observe.client import JobClient


class HereCommand:
    """A command of this machine in the place of one in a container."""

    path = os.environ["PATH"]
    cut = -1  # bytes of its output after which the connection breaks; -1: never
    started: list[list[str]]

    def __init__(
        self, access: object, target: object, command: list[str], *, container: str, stdin: bool = True
    ) -> None:
        assert not stdin  # nobody would end it
        pipe = subprocess.PIPE
        environment = {"PATH": self.path}
        self._process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment)

    def run(self, write: Callable[[int, bytes], None], *, timeout: float | None = None) -> int:
        process, left = self._process, self.cut
        assert process.stdout
        assert process.stderr
        reader = threading.Thread(target=lambda: write(STDERR, process.stderr.read()))  # type: ignore[union-attr]
        reader.start()
        while data := process.stdout.read1(1000):  # type: ignore[attr-defined]
            write(STDOUT, data)
            left -= len(data)
            if self.cut >= 0 and left < 0:
                raise UnreachableError("the connection to gpt-worker-0 ended before the command did")
        reader.join()
        return process.wait()

    def close(self) -> None:
        self._process.kill()
        for stream in (self._process.stdout, self._process.stderr):
            if stream and threading.current_thread() is threading.main_thread():
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> copying.Container:
    """A container whose files are those of this machine."""
    monkeypatch.setattr(copying, "RemoteCommand", HereCommand)
    return copying.Container(JobClient.connect(), "gpt-worker-0", "pytorch")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with a large file, an empty one, a folder, odd names and a hard link."""
    folder = tmp_path / "run 1"
    (folder / "step-10" / "empty").mkdir(parents=True)
    (folder / "step-10" / "shard.bin").write_bytes(os.urandom(3_000_000))
    (folder / "--checkpoint-action=x").write_text("odd\n")
    (folder / "none").touch()
    (folder / "script.sh").write_text("echo\n")
    (folder / "script.sh").chmod(0o755)
    os.link(folder / "script.sh", folder / "same.sh")
    return folder


def files(folder: Path) -> dict[str, Any]:
    """What is below a folder: the bytes of files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.is_dir() or path.read_bytes()
    return found


def test_a_folder(container: copying.Container, tree: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    (tree / "out").symlink_to("/etc/passwd")
    (tmp_path / "link").symlink_to(tree)
    assert container.read(f"{tmp_path}/link", str(tmp_path / "here"), notes.append) == str(tmp_path / "here")
    assert notes == ["left out run 1/out: it is neither a file nor a folder"]
    (tree / "out").unlink()
    assert files(tmp_path / "here") == files(tree)
    assert os.access(tmp_path / "here" / "script.sh", os.X_OK)


def test_a_file_is_copied_into_a_folder_and_leaves_nothing_beside_it(
    container: copying.Container, tree: Path, tmp_path: Path
) -> None:
    shard = tree / "step-10" / "shard.bin"
    copied = container.read(str(shard), f"{tmp_path}/", print)
    assert Path(copied).read_bytes() == shard.read_bytes()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".flk-cp-")]


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("nowhere", "here", "gpt-worker-0:HERE/nowhere: there is no HERE/nowhere; nothing of it is copied"),
        ("run 1", "no/folder", "HERE/no/folder cannot be written: No such file or directory"),
        ("run 1", "file", "HERE/file cannot be written: Not a directory"),
        ("run 1/none", "dir", "HERE/dir/none exists already on this machine"),
        ("run 1/none", "new/", "there is no folder HERE/new/ on this machine"),
    ],
)
def test_what_cannot_be_read(
    container: copying.Container, tree: Path, tmp_path: Path, source: str, target: str, reason: str
) -> None:
    (tmp_path / "dir" / "none").mkdir(parents=True)
    (tmp_path / "file").touch()
    before = files(tmp_path)
    with pytest.raises(FlkError) as caught:
        container.read(f"{tmp_path}/{source}", f"{tmp_path}/{target}", print)
    assert str(caught.value).replace(str(tmp_path), "HERE") == reason
    assert files(tmp_path) == before


@pytest.mark.promise("Clusters: flk exec, cp and port-forward reach the pod of a rank")
def test_a_cut_connection_leaves_nothing(
    container: copying.Container, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(tmp_path)
    monkeypatch.setattr(HereCommand, "cut", 1_000_000)
    with pytest.raises(UnreachableError, match="ended before the command did"):
        container.read(str(tree), f"{tmp_path}/here", print)
    assert files(tmp_path) == before


def test_a_file_that_a_job_writes_meanwhile(
    container: copying.Container, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    said = "tar: ./none: file changed as we read it"
    (tmp_path / "tar").write_text(f'#!/bin/sh\n{shutil.which("tar")} "$@"\necho {said} >&2\nexit 1\n')
    (tmp_path / "tar").chmod(0o755)
    monkeypatch.setattr(HereCommand, "path", f"{tmp_path}:{HereCommand.path}")
    container.read(f"{tree}/none", f"{tmp_path}/here", notes.append)
    assert notes == [f"copying {tree}/none: {said}"]
    assert (tmp_path / "here").exists()


def test_an_archive_whose_file_has_a_name_is_no_copy(
    container: copying.Container, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As NFS shows a file that is removed while it is open.
    monkeypatch.setattr(copying.tempfile, "TemporaryFile", lambda dir: io.FileIO(Path(dir) / ".nfs01", "w+"))
    container.read(str(tree), f"{tmp_path}/here", print)
    assert files(tmp_path / "here") == files(tree)


def test_an_archive_for_which_there_is_no_room(
    container: copying.Container, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(tmp_path)
    monkeypatch.setattr(copying.tempfile, "TemporaryFile", lambda dir: io.FileIO("/dev/full", "r+"))
    with pytest.raises(UsageError, match="here cannot be written: No space left"):
        container.read(str(tree), f"{tmp_path}/here", print)
    assert files(tmp_path) == before


def archive(*members: tuple[str, str, bytes], links: bytes = tarfile.SYMTYPE) -> io.BytesIO:
    """An archive of a folder: names, where links lead, and the bytes of files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        root = tarfile.TarInfo("out")
        root.type, root.mode = tarfile.DIRTYPE, 0o755
        made.addfile(root)
        for name, link, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.linkname = len(content), link
            info.type = links if link else tarfile.REGTYPE
            made.addfile(info, io.BytesIO(content))
    data.seek(0)
    return data


def unpacked(folder: Path, stream: io.BytesIO) -> list[str]:
    """What is noted of an archive that a pod sends."""
    notes: list[str] = []
    copying._unpacked(stream, folder, notes.append)
    return notes


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (archive(("../evil", "", b"x")), "is outside the destination"),
        (archive(("out/../../evil", "", b"x")), "is outside the destination"),
        (archive(("out/a", "../../evil", b""), links=tarfile.LNKTYPE), "is outside the destination"),
        (io.BytesIO(archive(("out/a", "", b"x" * 5000)).read()[:2000]), "is not a whole archive"),
        (io.BytesIO(b"not an archive"), "is not a whole archive"),
        (archive(("other", "", b"x")), "is neither a file nor a folder"),
    ],
)
def test_what_a_pod_may_not_send(stream: io.BytesIO, error: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    with pytest.raises(ApiError, match=error):
        unpacked(tmp_path / "inner", stream)
    assert list(tmp_path.iterdir()) == [tmp_path / "inner"]


def test_links_are_left_out_and_nothing_is_written_through_them(tmp_path: Path) -> None:
    stream = archive(("out/up", "..", b""), ("out/up/evil", "", b"x"), ("out/file", "", b"x"))
    assert unpacked(tmp_path, stream) == ["left out out/up: it is neither a file nor a folder"]
    assert files(tmp_path) == {"out": True, "out/file": b"x", "out/up": True, "out/up/evil": b"x"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mtime", "nan"),
        ("mtime", "1e300"),
        ("size", "-1"),
        ("path", "a\0b"),
        ("path", "x" * 9000),
        ("GNU.sparse.size", "99999999999999"),
        ("GNU.sparse.map", "0,x"),
        ("hdrcharset", "BINARY"),
    ],
)
def test_headers_that_no_tar_writes(key: str, value: str, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as made:
        info = tarfile.TarInfo("a")
        info.pax_headers, info.size = {key: value}, 1
        made.addfile(info, io.BytesIO(b"x"))
    with contextlib.suppress(ApiError, OSError):  # and no other error
        unpacked(tmp_path, io.BytesIO(stream.getvalue()))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1
