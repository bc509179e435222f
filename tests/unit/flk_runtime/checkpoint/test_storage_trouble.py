"""Storage that fails at any call of a resume or of load_weights is passing trouble, with its cause."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from obstore.exceptions import GenericError
from obstore.store import MemoryStore
from safetensors.torch import save_file
from torch import nn

from flk_runtime.checkpoint import storage
from flk_runtime.checkpoint.adapters.adapt import module_state
from flk_runtime.checkpoint.files import safetensors, weights
from flk_runtime.checkpoint.files.weights import Weights
from flk_runtime.checkpoint.load import SavedObject
from flk_runtime.checkpoint.manager import CheckpointOptions
from flk_runtime.checkpoint.opening import open_checkpoints
from flk_runtime.checkpoint.storage import folder
from flk_runtime.checkpoint.storage.folder import FolderDestination
from flk_runtime.checkpoint.storage.s3 import S3Destination
from flk_runtime.contract.failure import Kind, Retry
from flk_runtime.errors import MismatchError, StorageError
from flk_runtime.shared.failure_report import describe
from flk_runtime.system import faults
from tests.support import checkpoints
from tests.support.checkpoints import store_model

TROUBLE = [
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ETIMEDOUT, "Connection timed out"),
    TimeoutError("timed out"),
]
UNAVAILABLE = GenericError("Generic S3 error: Server returned non-2xx status code: 503 Service Unavailable: ")
FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter)
BUCKET = "s3://bucket/run"


class Trouble:
    """Raises ``error`` at the call with the number ``at``, and remembers that it did."""

    def __init__(self, error: Exception, at: int) -> None:
        self._error, self._rest = error, at
        self.raised = False

    def call(self) -> None:
        self._rest -= 1
        if self._rest == -1:
            self.raised = True
            raise self._error

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **named: Any) -> Any:
            self.call()
            found = function(*arguments, **named)
            return Stream(found, self) if isinstance(found, FILES) else found

        return failing


class Stream(io.RawIOBase):
    """A file whose reads and writes may fail."""

    def __init__(self, stream: Any, trouble: Trouble) -> None:
        self._stream, self._trouble = stream, trouble

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seek(self, *arguments: int) -> int:
        return int(self._stream.seek(*arguments))

    def tell(self) -> int:
        return int(self._stream.tell())

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def readinto(self, buffer: Any) -> Any:
        self._trouble.call()
        return self._stream.readinto(buffer)

    def write(self, data: Any) -> Any:
        self._trouble.call()
        return self._stream.write(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def in_turn(use: Callable[[Trouble], object], errors: Sequence[Exception]) -> int:
    """Have each call of ``use`` fail, one after the other, until a use succeeds. Returns how many calls there are."""
    for at in itertools.count():
        error, raised = errors[at % len(errors)], None
        trouble = Trouble(error, at)
        try:
            use(trouble)
        except StorageError as storage_error:
            raised = storage_error
        if raised is None:
            assert not trouble.raised, f"the error of call {at} is lost"
            return at
        assert error in faults.chain(raised)
        meaning = describe(raised)["kind"].meaning
        assert (meaning.retried_by, meaning.final_after) == (Retry.LAUNCHER, 10), (at, raised)
    raise AssertionError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with one checkpoint."""
    store_model(str(tmp_path / "run"), nn.Linear(2, 3).state_dict())
    return tmp_path / "run"


FILE_CALLS = ("steps", "latest", "open", "measure")
FUNCTIONS = [
    *((FolderDestination, name, getattr(FolderDestination, name)) for name in FILE_CALLS),
    *((Path, name, getattr(Path, name)) for name in ("stat", "glob", "read_bytes", "touch")),
    (torch, "load", torch.load),
    (weights, "open_section", folder.open_section),
    (safetensors, "open", builtins.open),
    (folder, "open", builtins.open),
]


@contextlib.contextmanager
def failing_files(trouble: Trouble) -> Iterator[None]:
    """Has the calls fail by which files are used. A folder's `prepare` and `claim` are left out."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, function in FUNCTIONS:
            patch.setattr(owner, name, trouble.wrap(function), raising=False)
        yield


def resume(place: str) -> None:
    """Restore a model as a run does."""
    options = CheckpointOptions(place=place, seed=0, metadata={}, timeout=60.0)
    manager = open_checkpoints(options, print, print, print)
    manager.register("model", module_state(nn.Linear(2, 3)))


def load(place: str) -> None:
    """Load weights into a model as a run does."""
    found: Any = Weights(place)
    module_state(nn.Linear(2, 3)).read(SavedObject(found, "model", {}))


@pytest.mark.parametrize("error", TROUBLE, ids=repr)
def test_a_folder_that_fails_at_any_call_of_a_resume(run: Path, error: Exception) -> None:
    def use(trouble: Trouble) -> None:
        with failing_files(trouble):
            resume(str(run))

    assert in_turn(use, [error]) > 10


@pytest.mark.parametrize("place", ["run", "run/step-000000000", "weights.safetensors", "huggingface", "torch.pt"])
def test_a_folder_that_fails_at_any_call_of_load_weights(tmp_path: Path, run: Path, place: str) -> None:
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "one.safetensors"}})
    )
    for file in (tmp_path / "weights.safetensors", tmp_path / "huggingface" / "one.safetensors"):
        save_file(nn.Linear(2, 3).state_dict(), file)
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "torch.pt")

    def use(trouble: Trouble) -> None:
        with failing_files(trouble):
            load(str(tmp_path / place))

    assert in_turn(use, TROUBLE) > 2


class Bucket:
    """S3 in memory: has the calls of destinations go to it, each of which may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store = MemoryStore()
        self._trouble = Trouble(UNAVAILABLE, -1)
        for module in (storage, weights, checkpoints):
            monkeypatch.setattr(module, "open_destination", self._open)

    def _open(self, place: str) -> Any:
        if not place.startswith("s3:"):
            return FolderDestination(Path(place))
        destination = S3Destination(place)
        destination._store, destination._client = self._store, self  # type: ignore[assignment]
        return destination

    def fail(self, trouble: Trouble) -> None:
        self._trouble = trouble

    def __getattr__(self, name: str) -> Any:
        return self._trouble.wrap(getattr(obstore, name))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    made = Bucket(monkeypatch)
    store_model(BUCKET, nn.Linear(2, 3).state_dict())
    return made


def test_a_bucket_that_fails_at_any_call_of_a_resume(bucket: Bucket) -> None:
    def use(trouble: Trouble) -> None:
        bucket.fail(trouble)
        resume(BUCKET)

    assert in_turn(use, [UNAVAILABLE]) > 8


def test_saves_go_on_after_somebody_has_emptied_the_bucket(bucket: Bucket) -> None:
    first, second = (bucket._open(BUCKET) for _ in range(2))
    first.token, second.token = "first", "second"
    first.claim()
    first.commit(8, b"{}")
    obstore.delete(bucket._store, [str(each["path"]) for each in obstore.list(bucket._store).collect()])
    first.commit(9, b"{}")
    assert first.steps() == [9]
    second.claim()
    with pytest.raises(MismatchError, match="another run saves in"):
        first.commit(10, b"{}")


def test_a_path_without_weights_is_final(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"cannot read weights from .*: No such file or directory") as raised:
        Weights(str(tmp_path / "none.safetensors"))
    assert describe(raised.value)["kind"] is Kind.MISMATCH
