"""The store of shards: what is held, what may be overwritten, and what an attempt that has ended may not do."""

from __future__ import annotations

import shutil
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
    return ShardStore(tmp_path / "shards", 1 << 20)


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


def reserve(store: ShardStore, *ranks: int, size: int = SIZE) -> list[Path]:
    """Make room for the shards of these ranks, and return the files of the first one."""
    store.reserve(store._attempt, dict.fromkeys(ranks, size), 1)
    return store.files_of(ranks[0])


def taken(store: ShardStore) -> int:
    """The bytes of all files."""
    return sum(path.stat().st_size for path in store.folder.glob("*.shard"))


def hold_two(store: ShardStore) -> list[Path]:
    """Hold the shards of rank 0 after steps 1 and 2 of the first attempt; returns their files."""
    store.keep_only(None, attempt="first")
    paths = reserve(store, 0)
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


def test_a_rank_writes_into_two_files_in_turn(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    one, two = reserve(store, 0)
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


def test_a_shard_is_not_held_any_more_when_its_rank_overwrites_it(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    path, _ = reserve(store, 0)
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
    one, two = reserve(store, 0)
    for step, path in ((1, one), (2, two), (3, one)):
        finish(path, step)
        if step < 3:
            store.seal(path, "first")
    store.settle(shard(2).checkpoint, {0})
    assert store.seal(one, "first") == shard(3)


def test_a_rank_gets_the_file_first_that_holds_nothing_it_may_need(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    one, two = reserve(store, 0)
    finish(one, 1)
    store.seal(one, "first")
    store.keep_only(shard(1).checkpoint, attempt="second")
    assert reserve(store, 0) == [two, one]


def test_a_rank_waits_for_a_copy_that_is_still_received_into_its_file(store: ShardStore) -> None:
    """The pod held copies of the rank's shards in the attempt before."""
    store.keep_only(None, attempt="first")
    slot = store.begin(shard(1), SIZE, 1)
    store.keep_only(None, attempt="second")
    with pytest.raises(TimeoutError, match="no file became free"):
        store.reserve("second", {0: SIZE}, 0.1)
    threading.Timer(0.2, store.cancel, (slot,)).start()
    begin = time.monotonic()
    store.reserve("second", {0: SIZE}, 30)
    assert slot.path in store.files_of(0)
    assert time.monotonic() - begin < 10


def test_a_shard_that_is_sealed_after_its_attempt_is_not_held(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    path, _ = reserve(store, 0)
    finish(path, 1)
    store.keep_only(None, attempt="second")
    with pytest.raises(ShardError, match="not finished"):  # the attempt has cleared it
        store.seal(path, "first")
    finish(path, 1)
    with pytest.raises(AttemptEndedError):
        store.seal(path, "first")
    assert store.shards() == []
    assert store.seal(path, "second") == shard(1, "second")


def test_what_a_rank_of_an_attempt_that_has_ended_reserves_changes_nothing(store: ShardStore) -> None:
    """Its thread has waited, for copies to a partner that does not answer, until the next attempt began."""
    paths = hold_two(store)
    newest, older = shard(2).checkpoint, shard(1).checkpoint
    store.keep_only(newest, attempt="second", others=[older])
    with pytest.raises(AttemptEndedError):
        store.reserve("first", {1: SIZE, 2: SIZE}, 1)
    assert store.shards() == [shard(1), shard(2)]
    assert sorted(store.files_of(0)) == sorted(paths)


def test_a_folder_in_which_no_file_can_be_made_has_no_room(store: ShardStore) -> None:
    """Another program has removed it, or the file system has as many files as it may."""
    store.keep_only(None, attempt="first")
    shutil.rmtree(store.folder)
    with pytest.raises(NoRoomError, match="No such file"):
        store.reserve("first", {0: SIZE}, 1)


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


def test_files_of_ranks_whose_shards_go_elsewhere_are_removed(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    for rank in (0, 1):
        receive(store, shard(1, rank=rank))
    store.keep_only(shard(1).checkpoint, attempt="second")
    receive(store, shard(2, "second"))
    store.settle(shard(2, "second").checkpoint, {0})
    assert store.shards() == [shard(2, "second")]
    assert len(list(store.folder.glob("*.shard"))) == 2


def hold_as_partner_of_rank_1(store: ShardStore) -> None:
    """Hold shards of the own rank 0 and of rank 1, so that a restore has one of each."""
    store.keep_only(None, attempt="first")
    path, _ = reserve(store, 0, 1)
    finish(path, 1)
    store.seal(path, "first")
    receive(store, shard(1, rank=1))


def test_after_a_change_of_the_partner_the_same_memory_is_enough(store: ShardStore) -> None:
    """The shard of the former partner, which the new one holds too, gives way."""
    store.limit = 4 * SIZE
    hold_as_partner_of_rank_1(store)
    store.keep_only(shard(1).checkpoint, attempt="second")
    receive(store, shard(1, rank=2))
    assert store.shards() == [shard(1), shard(1, rank=1), shard(1, rank=2)]
    store.reserve("second", {0: SIZE, 2: SIZE}, 1, copied=[shard(1, rank=rank) for rank in (1, 2)])
    one, two = store.files_of(0)
    assert store.shards() == [shard(1), shard(1, rank=2)]
    assert taken(store) == 4 * SIZE
    finish(one, 2)
    store.seal(one, "second")
    receive(store, shard(2, "second", rank=2), keep=shard(1))
    store.settle(shard(2, "second").checkpoint, {0, 2})
    assert store.shards() == [shard(2, "second"), shard(2, "second", rank=2)]
    finish(two, 3)
    store.seal(two, "second")
    receive(store, shard(3, "second", rank=2), keep=shard(2, "second"))
    assert taken(store) == 4 * SIZE


def test_files_of_nobody_stay_while_there_is_room(store: ShardStore) -> None:
    hold_two(store)
    store.keep_only(None, attempt="second")
    store.cancel(store.begin(shard(1, "second", rank=1), 2 * SIZE, 1))
    assert taken(store) == 3 * SIZE


def test_older_checkpoints_stay_until_their_files_are_needed(store: ShardStore) -> None:
    store.limit = 4 * SIZE
    store.keep_only(None, attempt="first")
    reserve(store, 0, 1)
    for step in (1, 2):
        for rank in (0, 1):
            receive(store, shard(step, rank=rank), keep=shard(1) if step == 2 else None)
    newest, older = shard(2).checkpoint, shard(1).checkpoint
    store.keep_only(newest, attempt="second", others=[older])
    assert len(store.shards()) == 4
    receive(store, shard(2, rank=2))  # a copy for the new partner, which takes the file of an older shard
    assert taken(store) == 4 * SIZE
    assert len(store.shards()) == 4
    store.reserve("second", {0: SIZE, 2: SIZE}, 1, copied=[shard(2, rank=1)])
    assert store.shards() == [shard(2), shard(2, rank=2)]
    assert taken(store) == 4 * SIZE


def test_a_refusal_names_all_that_is_needed_and_takes_nothing(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    for size, least in ((1 << 18, 1 << 20), (1 << 17, (1 << 20) + (1 << 19))):
        with pytest.raises(NoRoomError, match=r"1\.5 MiB are needed and the limit is 1 MiB"):
            store.reserve("first", dict.fromkeys(range(3), size), 1, least=least)
    assert taken(store) == 0


def test_a_copy_in_a_file_of_a_rank_gives_way_to_a_shard_that_only_this_pod_keeps(store: ShardStore) -> None:
    store.limit = 4 * SIZE
    store.keep_only(None, attempt="first")
    for rank in (0, 2, 3):
        receive(store, shard(1, rank=rank))
    store.keep_only(shard(1).checkpoint, attempt="second")
    store.reserve("second", {0: SIZE, 2: SIZE}, 1, copied=[shard(1, rank=2)])
    assert store.shards() == [shard(1), shard(1, rank=3)]
    assert taken(store) == 4 * SIZE
    files = [store.files_of(rank) for rank in (0, 2)]
    for path, _ in files:
        finish(path, 2)
        store.seal(path, "second")
    assert shard(1, rank=3) in store.shards()


def test_memory_is_taken_while_others_use_the_store(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for large shards, and the launcher's loop must not wait."""
    store.keep_only(None, attempt="first")
    answers: list[list[ShardId]] = []
    allocate = store._fallocate

    def look(path: Path, size: int) -> None:
        if size == SIZE:
            looking = threading.Thread(target=lambda: answers.append(store.shards()))
            looking.start()
            looking.join(10)
        allocate(path, size)

    monkeypatch.setattr(store, "_fallocate", look)
    reserve(store, 0)
    store.begin(shard(1, rank=1), SIZE, 1)
    assert answers == [[], [], []]


def test_a_launcher_finds_whole_shards_of_the_one_before(tmp_path: Path, store: ShardStore) -> None:
    one, two = hold_two(store)
    finish(one, 3)  # not sealed
    lines: list[str] = []
    found = ShardStore(tmp_path / "shards", 1 << 20)
    found.load(lines.append)
    assert (found.shards(), lines) == ([shard(2)], [])
    content = bytearray(two.read_bytes())
    content[DATA_BEGIN] ^= 1
    two.write_bytes(content)
    damaged = ShardStore(tmp_path / "shards", 1 << 20)
    damaged.load(lines.append)
    assert damaged.shards() == []
    assert lines == [
        "dropped a shard of a checkpoint in memory: its data has another checksum than its beginning names"
    ]
    assert list(store.folder.glob("*.shard")) == []


def test_an_attempt_that_starts_again_leaves_nothing_for_a_later_launcher(tmp_path: Path, store: ShardStore) -> None:
    """Also of checkpoints that were not needed any more, whose files still held them."""
    hold_two(store)
    store.settle(shard(2).checkpoint, {0})
    store.keep_only(None, attempt="second")
    found = ShardStore(tmp_path / "shards", 1 << 20)
    found.load(lambda line: None)
    assert found.shards() == []


def test_shards_that_grow_keep_their_files_and_what_these_hold(store: ShardStore) -> None:
    store.keep_only(None, attempt="first")
    paths = reserve(store, 0)
    finish(paths[1], 1)
    store.seal(paths[1], "first")
    store.reserve("first", {0: 10 * SIZE}, 1)
    assert store.files_of(0) == paths
    assert store.shards() == [shard(1)]
    assert [path.stat().st_size for path in paths] == [10 * SIZE] * 2
    with pytest.raises(NoRoomError, match=r"2\.1 MiB are needed and the limit is 1 MiB"):
        store.reserve("first", {0: SIZE, 1: 1 << 20}, 1)
    with store.reading(shard(1)) as memory:
        assert memory
        assert len(memory) == 10 * SIZE
        assert read_preamble(memory).step == 1


def test_a_reservation_that_fails_leaves_all_files_as_they_were(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.keep_only(None, attempt="first")
    reserve(store, 0)

    def full(path: Path, size: int) -> None:
        raise NoRoomError("the file system is full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_fallocate", full)
        with pytest.raises(NoRoomError, match="full"):
            store.reserve("first", {0: 2 * SIZE, 1: SIZE}, 1)
    assert [(slot.size, slot.written) for slot in store._slots] == [(SIZE, False)] * 2
    assert len(reserve(store, 0, 1, size=2 * SIZE)) == 2


def test_what_only_has_the_name_of_a_shard_is_said_and_takes_no_checkpoint_away(tmp_path: Path) -> None:
    (tmp_path / "000003.shard").mkdir()
    (tmp_path / "x.shard").touch()
    lines: list[str] = []
    store = ShardStore(tmp_path, 1 << 20)
    store.load(lines.append)
    assert len(lines) == 2
    store.keep_only(None, attempt="a")
    store.reserve("a", {0: 4096}, 1)
    assert len(store.files_of(0)) == 2
