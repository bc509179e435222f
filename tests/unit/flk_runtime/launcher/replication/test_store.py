"""The store of shards: what is held, what may be overwritten, and what an attempt that has ended may not do."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.replication.store import AttemptEndedError, NoRoomError, ShardStore
from flk_runtime.shared.shard_file import (
    DATA_BEGIN,
    Entry,
    ShardError,
    ShardFile,
    ShardPreamble,
    read_preamble,
    sealed_preamble,
)

SIZE = 4096
ENTRY = Entry("x", ("x",), DATA_BEGIN, 1000)


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "parts", 1 << 20)


def shard(step: int, written_in: str = "first", rank: int = 0, number: int | None = None) -> ShardId:
    return ShardId(CheckpointId(written_in, step, 2, step if number is None else number), rank)


def finish(path: Path, step: int, rank: int = 0, number: int | None = None) -> None:
    """Write a shard, as a rank does. ``number``: of its save, default one for each step."""
    file = ShardFile(path, [ENTRY], {})
    file.begin()
    file.memory[DATA_BEGIN : DATA_BEGIN + 4] = step.to_bytes(4, "little")
    number = step if number is None else number
    file.finish(step=step, number=number, world_size=2, rank=rank, values=b"values")
    file.close()


def hold_two(store: ShardStore) -> list[Path]:
    """Hold the shards of rank 0 after steps 1 and 2 of the first attempt; returns their files."""
    store.keep_only(None, attempt="first")
    paths = store.reserve(0, SIZE, 1)
    for step, path in enumerate(paths, 1):
        finish(path, step)
        store.seal(path, "first")
    return paths


def preamble_of(path: Path, written: ShardId) -> ShardPreamble:
    """The preamble of a shard that another launcher has sent."""
    finish(path, written.checkpoint.step, written.rank, written.checkpoint.number)
    return sealed_preamble(memoryview(path.read_bytes()), written.checkpoint.written_in)


def receive(store: ShardStore, sent: ShardId, keep: ShardId | None = None) -> None:
    """Do what the exchange does with a copy of a shard."""
    slot = store.begin(sent, SIZE, 1, keep=keep.checkpoint if keep else None)
    store.hold(slot, preamble_of(slot.path, sent))


def test_two_saves_after_the_same_step_are_two_checkpoints(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    one, two = store.reserve(0, SIZE, 1)
    for number, path in ((1, one), (2, two)):
        finish(path, 7, number=number)
        assert store.seal(path, "first") == shard(7, number=number)
        receive(store, shard(7, rank=1, number=number))
    both = [shard(7, rank=rank, number=number) for number in (1, 2) for rank in (0, 1)]
    assert store.shards() == both
    store.settle(shard(7, number=1).checkpoint, {0, 1})
    assert store.shards() == both
    store.settle(shard(7, number=2).checkpoint, {0, 1})
    assert store.shards() == both[2:]


def test_a_rank_writes_into_two_files_in_turn(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    one, two = store.reserve(0, SIZE, 1)
    finish(one, 1)
    assert store.shards() == []
    assert store.seal(one, "first") == shard(1)
    finish(two, 2)
    store.seal(two, "first")
    assert store.shards() == [shard(1), shard(2)]
    store.settle(shard(2).checkpoint, {0})
    assert store.shards() == [shard(2)]
    finish(one, 3)
    store.seal(one, "first")
    assert store.shards() == [shard(2), shard(3)]


def test_a_part_is_not_held_any_more_when_its_rank_overwrites_it(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    path, _ = store.reserve(0, SIZE, 1)
    finish(path, 1)
    store.seal(path, "first")
    file = ShardFile(path, [ENTRY], {})
    file.begin()
    assert store.shards() == []
    assert store.path(shard(1)) is None
    with pytest.raises(ShardError, match="not finished"):
        store.seal(path, "first")
    file.close()


def test_settling_leaves_what_a_rank_has_begun_to_write(store: ShardStore) -> None:
    """The rank knows that the checkpoint is whole before the launcher hears of it."""
    store.keep_only(None, attempt="first")
    one, two = store.reserve(0, SIZE, 1)
    for step, path in ((1, one), (2, two), (3, one)):
        finish(path, step)
        if step < 3:
            store.seal(path, "first")
    store.settle(shard(2).checkpoint, {0})
    assert store.seal(one, "first") == shard(3)


def test_a_rank_gets_the_file_first_that_holds_nothing_it_may_need(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    one, two = store.reserve(0, SIZE, 1)
    finish(one, 1)
    store.seal(one, "first")
    store.keep_only(shard(1).checkpoint, attempt="second")
    assert store.reserve(0, SIZE, 1) == [two, one]


def test_a_rank_waits_for_a_copy_that_is_still_received_into_its_file(store: ShardStore) -> None:
    """The pod held copies of the rank's shards in the attempt before."""
    store.keep_only(None, attempt="first")
    slot = store.begin(shard(1), SIZE, 1)
    store.keep_only(None, attempt="second")
    with pytest.raises(TimeoutError, match="no file for rank 0 became free"):
        store.reserve(0, SIZE, 0.1)
    threading.Timer(0.2, store.cancel, (slot,)).start()
    begin = time.monotonic()
    assert slot.path in store.reserve(0, SIZE, 30)
    assert time.monotonic() - begin < 10


def test_a_part_that_is_sealed_after_its_attempt_is_not_held(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    path, _ = store.reserve(0, SIZE, 1)
    finish(path, 1)
    store.keep_only(None, attempt="second")
    with pytest.raises(ShardError, match="not finished"):  # the attempt has cleared it
        store.seal(path, "first")
    finish(path, 1)
    with pytest.raises(AttemptEndedError):
        store.seal(path, "first")
    assert store.shards() == []
    assert store.seal(path, "second") == shard(1, "second")


def test_only_files_of_the_store_are_sealed(store: ShardStore, tmp_path: Path) -> None:
    finish(tmp_path / "other", 1)
    with pytest.raises(ValueError, match="is no file for parts"):
        store.seal(tmp_path / "other", "")


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_copy_that_arrives_after_its_attempt_takes_no_file(store: ShardStore, begun: str) -> None:
    store.keep_only(None, attempt="first")
    receive(store, shard(1))
    slot = store.begin(shard(2), SIZE, 1) if begun == "before" else None
    store.keep_only(shard(1).checkpoint, attempt="second")
    with pytest.raises(AttemptEndedError):
        store.hold(slot, preamble_of(slot.path, shard(2))) if slot else store.begin(shard(2), SIZE, 1)
    assert store.shards() == [shard(1)]
    receive(store, shard(2, "second"))
    assert store.shards() == [shard(1), shard(2, "second")]


def test_a_copy_of_what_the_attempt_began_from_is_held(store: ShardStore) -> None:
    """Its owner may have begun the attempt before this launcher."""
    store.keep_only(None, attempt="first")
    slot = store.begin(shard(1), SIZE, 1)
    store.keep_only(shard(1).checkpoint, attempt="second")
    store.hold(slot, preamble_of(slot.path, shard(1)))
    assert store.shards() == [shard(1)]


def test_a_copy_replaces_only_what_is_not_of_a_whole_checkpoint(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    receive(store, shard(1))
    receive(store, shard(2), keep=shard(1))  # a shard of it is missing elsewhere
    receive(store, shard(3), keep=shard(1))
    assert store.shards() == [shard(1), shard(3)]
    receive(store, shard(4), keep=shard(3))
    assert store.shards() == [shard(3), shard(4)]


def test_what_the_attempt_began_from_stays_until_another_checkpoint_is_whole(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    receive(store, shard(5))
    store.keep_only(shard(5).checkpoint, attempt="second")
    for step in (6, 7):
        receive(store, shard(step, "second"))
        assert store.shards() == [shard(5), shard(step, "second")]
    receive(store, shard(8, "second"), keep=shard(7, "second"))
    assert store.shards() == [shard(7, "second"), shard(8, "second")]


def test_files_of_ranks_whose_parts_go_elsewhere_are_removed(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    for rank in (0, 1):
        receive(store, shard(1, rank=rank))
    store.keep_only(shard(1).checkpoint, attempt="second")
    receive(store, shard(2, "second"))
    store.settle(shard(2, "second").checkpoint, {0})
    assert store.shards() == [shard(2, "second")]
    assert len(list(store.folder.glob("*.part"))) == 2


def test_a_launcher_finds_whole_parts_of_the_one_before(tmp_path: Path, store: ShardStore) -> None:
    one, two = hold_two(store)
    finish(one, 3)  # not sealed
    lines: list[str] = []
    found = ShardStore(tmp_path / "parts", 1 << 20)
    found.load(lines.append)
    assert (found.shards(), lines) == ([shard(2)], [])
    content = bytearray(two.read_bytes())
    content[DATA_BEGIN] ^= 1
    two.write_bytes(content)
    damaged = ShardStore(tmp_path / "parts", 1 << 20)
    damaged.load(lines.append)
    assert damaged.shards() == []
    assert lines == ["dropped a part of a checkpoint in memory: its data has another checksum than its beginning names"]
    assert list(store.folder.glob("*.part")) == []


def test_an_attempt_that_starts_again_leaves_nothing_for_a_later_launcher(tmp_path: Path, store: ShardStore) -> None:
    """Also of checkpoints that were not needed any more, whose files still held them."""
    hold_two(store)
    store.settle(shard(2).checkpoint, {0})
    store.keep_only(None, attempt="second")
    found = ShardStore(tmp_path / "parts", 1 << 20)
    found.load(lambda line: None)
    assert found.shards() == []


def test_parts_that_grow_keep_their_files_and_what_these_hold(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    paths = store.reserve(0, SIZE, 1)
    finish(paths[1], 1)
    store.seal(paths[1], "first")
    assert store.reserve(0, 10 * SIZE, 1) == paths
    assert store.shards() == [shard(1)]
    assert [path.stat().st_size for path in paths] == [10 * SIZE] * 2
    with pytest.raises(NoRoomError, match=r"1\.1 MiB are needed and the limit is 1\.0 MiB"):
        store.reserve(1, 1 << 20, 1)
    with store.reading(shard(1)) as memory:
        assert memory
        assert len(memory) == 10 * SIZE
        assert read_preamble(memory).step == 1
