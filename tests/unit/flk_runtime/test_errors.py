"""The tree of errors: what may pass is retried, what is wrong for good is final, and the cause is kept."""

from __future__ import annotations

import ast
import builtins
import errno
import importlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flk_runtime
from flk_runtime import errors
from flk_runtime.checkpoint.memory import PodMemory
from flk_runtime.checkpoint.storage import restore
from flk_runtime.checkpoint.storage.folder import FolderDestination
from flk_runtime.contract.failure import Kind, Retry
from flk_runtime.errors import (
    DiscoveryError,
    MismatchError,
    PeerError,
    RendezvousError,
    RuntimeFailure,
    SetupError,
    StorageError,
    checkpoint_error,
)
from flk_runtime.launcher.processes import rank_process
from flk_runtime.launcher.replication.store import NoRoomError, ShardStore
from flk_runtime.shared import failure_report, memory_messages
from flk_runtime.shared.failure_report import describe
from flk_runtime.wire import VersionError, session


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SetupError, Kind.USAGE),
        (DiscoveryError, Kind.USAGE),
        (RendezvousError, Kind.RENDEZVOUS),
        (MismatchError, Kind.MISMATCH),
        (StorageError, Kind.STORAGE),
        (PeerError, Kind.PEER),
    ],
)
def test_a_rank_reports_the_kind_of_its_error(error: type[RuntimeFailure], kind: Kind) -> None:
    assert describe(error("why"))["kind"] is kind


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (TimeoutError("no answer within 60 s"), Kind.STORAGE),
        (OSError("the server answered 503 Service Unavailable"), Kind.STORAGE),
        (StorageError("pod 2 does not answer"), Kind.STORAGE),
        (OSError(errno.ESTALE, "Stale file handle"), Kind.IO),
        (OSError(errno.ENOSPC, "No space left on device"), Kind.DISK_FULL),
        (OSError(errno.EACCES, "Permission denied"), Kind.MISMATCH),
        (OSError(errno.EROFS, "Read-only file system"), Kind.READ_ONLY),
        (ValueError("it has another shape"), Kind.MISMATCH),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:5"), Kind.CONNECTION),
    ],
)
def test_what_happens_to_a_checkpoint_has_the_kind_of_its_cause(cause: Exception, kind: Kind) -> None:
    error = checkpoint_error("cannot restore 'model'", cause)
    error.__cause__ = cause
    assert describe(error)["kind"] is kind


@pytest.mark.parametrize(("file", "kind"), [("/data/shard-1", Kind.IO), (None, Kind.EXCEPTION)])
def test_an_error_that_a_mount_and_a_socket_may_have_is_of_a_disk_where_it_names_a_file(
    file: str | None, kind: Kind
) -> None:
    """The process that serves a mount by FUSE has ended."""
    assert describe(OSError(errno.ENOTCONN, "Transport endpoint is not connected", file))["kind"] is kind


def test_a_fifo_that_nobody_reads_is_no_fault_of_a_disk(tmp_path: Path) -> None:
    """Nor is a terminal that a pod does not have."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="No such device or address") as caught:
        os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK)
    assert caught.value.filename
    assert describe(caught.value)["kind"] is Kind.EXCEPTION


def test_a_folder_that_cannot_be_written_now_may_pass_and_one_that_never_can_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MismatchError, match="Not a directory") as final:
        FolderDestination(tmp_path / "file" / "below").prepare()
    assert describe(final.value)["kind"] is Kind.MISMATCH

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError) as passing:
        FolderDestination(tmp_path).prepare()
    assert describe(passing.value)["kind"] is Kind.IO


def test_storage_that_does_not_answer_at_a_resume_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*arguments: Any) -> list[int]:
        raise TimeoutError("timed out")

    monkeypatch.setattr(FolderDestination, "steps", hang)
    with pytest.raises(StorageError, match="cannot read the checkpoints in") as raised:
        restore.find_newest(FolderDestination(tmp_path), print)
    assert describe(raised.value)["kind"] is Kind.STORAGE
    assert isinstance(raised.value.__cause__, TimeoutError)


def test_a_launcher_that_does_not_answer_about_memory_may_pass(tmp_path: Path) -> None:
    memory = PodMemory(str(tmp_path / "none"), 0, 0)
    with pytest.raises(StorageError, match="does not answer") as raised:
        memory.restorable()
    assert describe(raised.value)["kind"] is Kind.STORAGE


@pytest.mark.parametrize(
    ("raises", "error", "cause"),
    [
        (
            lambda folder: ShardStore(folder, 1 << 20)._fallocate(folder / "none" / "file", 64),
            NoRoomError,
            FileNotFoundError,
        ),
    ],
)
def test_an_error_keeps_its_cause(
    tmp_path: Path, raises: Callable[[Path], object], error: type[RuntimeFailure], cause: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        raises(tmp_path)
    assert type(raised.value.__cause__) is cause


def test_a_launcher_of_another_version_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        with monkeypatch.context() as patch:
            patch.setattr(session, "VERSION", 1)
            greeting = memory_messages.session(serves=True).greeting

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(greeting)
                connection.recv(len(greeting))

        launcher = threading.Thread(target=answer)
        launcher.start()
        with pytest.raises(VersionError, match="speaks version 1 of flk's protocol") as raised:
            PodMemory(path, 0, 0).restorable()
        launcher.join()
    assert describe(raised.value)["kind"] is Kind.USAGE


PACKAGE = Path(flk_runtime.__file__).parent
OUTSIDE = {"ForeignError", "VariableError"}  # `flk_runtime.contract` imports nothing of flk


def written_classes() -> dict[str, tuple[str, str]]:
    """Each class of the runtime that is an error, with its first base class and its module."""
    classes: dict[str, tuple[list[str], str]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.bases:
                classes[node.name] = ([ast.unparse(base).rpartition(".")[2] for base in node.bases], module)

    def is_error(name: str) -> bool:
        if name in classes:
            return any(map(is_error, classes[name][0]))
        found = getattr(builtins, name, None)
        return isinstance(found, type) and issubclass(found, Exception)

    return {name: (bases[0], module) for name, (bases, module) in classes.items() if is_error(name)}


def drawn_classes() -> dict[str, tuple[str, str]]:
    """Each class in the drawing, with the class above it and its kind."""
    found, above = {}, {0: "Exception"}
    for line in str(errors.__doc__).splitlines():
        match = re.fullmatch(r"    ([│├└─ ]*)(\w+)(?: +(\w+) .*)?", line)
        if match:
            depth = len(match[1]) // 4
            above[depth + 1] = match[2]
            found[match[2]] = (above[depth], match[3] or Kind.EXCEPTION.value)
    return found


def test_the_drawing_has_every_error_of_the_runtime() -> None:
    public = {name: each for name, each in written_classes().items() if not name.startswith("_")}
    assert {name: base for name, (base, _) in drawn_classes().items()} == {
        name: base for name, (base, _) in public.items() if name not in OUTSIDE
    }
    for name, (_, kind) in drawn_classes().items():
        assert getattr(importlib.import_module(public[name][1]), name).kind.value == kind


def test_an_error_of_a_kind_that_is_retried_has_no_base_class_of_a_final_kind() -> None:
    """So `except` of a final kind never catches what may pass."""
    for name, (_, module) in written_classes().items():
        error = getattr(importlib.import_module(module), name)
        kinds = [getattr(each, "kind", Kind.EXCEPTION) for each in error.__mro__]
        final = [kind.meaning.retried_by is Retry.NOBODY for kind in kinds]
        assert final[0] or not any(final), (name, kinds)


def test_an_error_with_a_private_name_stays_in_its_module() -> None:
    private = {name: module for name, (_, module) in written_classes().items() if name.startswith("_")}
    assert private
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        words = set(re.findall(r"\w+", path.read_text()))
        assert all(where == module for name, where in private.items() if name in words), path


def test_a_script_that_python_cannot_read_is_shown_as_python_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1\n")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SyntaxError) as caught:
        rank_process._run([str(script)])
    error = caught.value.with_traceback(caught.tb.tb_next)  # without this test's own frame
    said = failure_report.format_error(error).splitlines()
    assert said[0].strip() == f'File "{script}", line 1'
    assert said[-1] == "SyntaxError: '(' was never closed"


def test_an_exception_of_flks_launcher_alone_keeps_its_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        exec(compile("{}[5]", rank_process.__file__, "exec"), {})
    error = caught.value.with_traceback(caught.tb.tb_next)  # without this test's own frame
    assert failure_report.format_error(error).splitlines()[1].strip().startswith(f'File "{rank_process.__file__}"')
