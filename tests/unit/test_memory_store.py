"""The store of parts: an attempt that has ended does nothing to the files of the next one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from flk_runtime.launcher.memory.plan import CheckpointId, Part
from flk_runtime.launcher.memory.store import AttemptEndedError, PartStore

SIZE = 4096


@pytest.fixture
def store(tmp_path: Path) -> PartStore:
    return PartStore(tmp_path / "parts", 1 << 20)


def part(step: int, written_in: str = "first") -> Part:
    return Part(CheckpointId(written_in, step, 2), rank=0)


def write(store: PartStore, written: Part, attempt: str | None) -> None:
    store.hold(store.begin(written.rank, SIZE, 1, attempt=attempt), written, attempt=attempt)


def test_a_rank_that_was_killed_while_it_waited_takes_no_file_from_its_successor(store: PartStore) -> None:
    """Both files of the rank hold parts, and the new attempt frees one of them."""
    store.keep_only(None, attempt="first")
    write(store, part(1), "first")
    write(store, part(2), "first")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            store.begin(0, SIZE, 30, attempt="first")
        except AttemptEndedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.2)  # it waits by now
    store.keep_only(part(1).checkpoint, attempt="second")
    waiting.join(5)
    assert raised
    assert store.parts() == [part(1)]
    write(store, part(2, "second"), "second")
    assert store.parts() == [part(1), part(2, "second")]


def test_late_requests_of_a_rank_do_nothing_to_the_file_of_its_successor(store: PartStore) -> None:
    store.keep_only(None, attempt="first")
    path = store.begin(0, SIZE, 1, attempt="first")
    store.keep_only(None, attempt="second")
    with pytest.raises(AttemptEndedError):
        store.begin(0, SIZE, 1, attempt="first")
    assert store.begin(0, SIZE, 1, attempt="second") == path
    with pytest.raises(ValueError, match="is not being written"):
        store.hold(path, part(1), attempt="first")
    with pytest.raises(ValueError, match="is not being written"):
        store.cancel(path, attempt="first")
    store.hold(path, part(1, "second"), attempt="second")
    assert store.parts() == [part(1, "second")]


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_copy_that_arrives_after_its_attempt_takes_no_file(store: PartStore, begun: str) -> None:
    store.keep_only(None, attempt="first")
    write(store, part(1), None)
    path = store.begin(0, SIZE, 1) if begun == "before" else None
    store.keep_only(part(1).checkpoint, attempt="second")
    store.hold(path or store.begin(0, SIZE, 1), part(2))
    assert store.parts() == [part(1)]
    write(store, part(2, "second"), None)
    assert store.parts() == [part(1), part(2, "second")]


def test_a_copy_of_what_the_attempt_began_from_is_held(store: PartStore) -> None:
    """Its owner may have begun the attempt before this launcher."""
    store.keep_only(None, attempt="first")
    path = store.begin(0, SIZE, 1)
    store.keep_only(part(1).checkpoint, attempt="second")
    store.hold(path, part(1))
    assert store.parts() == [part(1)]
