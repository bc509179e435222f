"""Shards that are fetched from launchers of other pods, over real connections on this machine."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flk_runtime.errors import CheckpointError
from flk_runtime.launcher.replication import exchange
from flk_runtime.launcher.replication import exchange as module
from flk_runtime.launcher.replication.exchange import Exchange, Fetcher, Partner
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.replication.store import AttemptEndedError, ShardStore
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.shard_file import DATA_BEGIN, Entry, ShardFile
from flk_runtime.wire import VersionError
from tests.support.ports import held_ports

SETTINGS = Settings(("train.py",), pods=3, secret="secret", lease=10.0)
SHARD = ShardId(CheckpointId("first", 1, 2, 1), 0)
SIZE = 3 << 20


def holding(folder: Path) -> ShardStore:
    """A store that holds the shard."""
    store = ShardStore(folder, 1 << 30)
    store.keep_only(None, attempt="first")
    store.reserve("first", {0: SIZE + 4096}, 1)
    path, _ = store.files_of(0)
    file = ShardFile(path, [Entry("x", ("x",), DATA_BEGIN, SIZE)], {})
    file.begin()
    file.finish(step=1, number=1, world_size=2, rank=0, values=b"")
    file.close()
    assert store.seal(path, "first") == SHARD
    return store


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts the launcher of another pod, and returns its port."""
    exchanges: list[Exchange] = []

    def start(store: ShardStore, port: int = 0) -> int:
        listener = socket.create_server(("127.0.0.1", port))
        port = int(listener.getsockname()[1])
        exchanges.append(Exchange(SETTINGS, store, listener, print))
        threading.Thread(target=exchanges[-1].run, daemon=True).start()
        return port

    yield start
    for each in exchanges:
        each.close()


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    own = ShardStore(tmp_path / "own", 1 << 30)
    own.keep_only(SHARD.checkpoint, attempt="second")
    return own


def fetcher(store: ShardStore, ports: dict[int, int], lease: float = 10.0) -> Fetcher:
    settings = replace(SETTINGS, lease=lease)
    return Fetcher(settings, store, lambda pod: ("127.0.0.1", ports[pod]))


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port at which nobody listens."""
    with held_ports() as hold:
        yield hold()


def damaged(folder: Path) -> ShardStore:
    """A store whose shard has been changed in memory."""
    held = holding(folder)
    path = held.path(SHARD)
    assert path
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[DATA_BEGIN + SIZE // 2] = 1
    return held


def test_holders_are_asked_in_turn(
    store: ShardStore, tmp_path: Path, serve: Callable[..., int], free_port: int
) -> None:
    """One is gone, one has not the shard, one has a damaged one, and the last has it."""
    ports = {
        1: free_port,
        2: serve(ShardStore(tmp_path / "empty", 1 << 30)),
        3: serve(damaged(tmp_path / "damaged")),
        4: serve(holding(tmp_path / "good")),
    }
    fetching = fetcher(store, ports)
    fetching.fetch(SHARD, [1, 2, 3, 4])
    assert store.shards() == [SHARD]
    assert fetching.received_at > 0


def test_a_holder_that_comes_back_is_asked_again(
    store: ShardStore, tmp_path: Path, serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    held, tries = holding(tmp_path / "good"), []
    connect = exchange.connect

    def counted(*arguments: object) -> object:
        tries.append(arguments)
        if len(tries) == 3:
            serve(held, free_port)
        return connect(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exchange, "connect", counted)
    monkeypatch.setattr(exchange, "_RETRY", (0.0, 0.0))
    fetcher(store, {1: free_port}).fetch(SHARD, [1])
    assert len(tries) == 3
    assert store.shards() == [SHARD]


def test_what_no_holder_can_give_is_an_error(store: ShardStore, tmp_path: Path, serve: Callable[..., int]) -> None:
    """Nobody is asked again who has said so, whatever the lease is."""
    ports = {1: serve(ShardStore(tmp_path / "empty", 1 << 30)), 2: serve(damaged(tmp_path / "damaged"))}
    with pytest.raises(CheckpointError, match="not held"):
        fetcher(store, ports, lease=1e6).fetch(SHARD, [2, 1])
    with pytest.raises(CheckpointError, match="another checksum"):
        fetcher(store, ports, lease=1e6).fetch(SHARD, [1, 2])
    assert store.shards() == []


def test_a_shard_whose_beginning_is_damaged_is_refused_at_once(
    store: ShardStore, tmp_path: Path, serve: Callable[..., int]
) -> None:
    """Not asked for again for the time of a lease, as a holder that does not answer is."""
    held = holding(tmp_path / "damaged")
    (slot,) = (slot for slot in held._slots if slot.held() == SHARD)
    slot.memory[20] ^= 1
    with pytest.raises(CheckpointError, match="its beginning is damaged"):
        fetcher(store, {1: serve(held)}, lease=1.0).fetch(SHARD, [1])


@pytest.mark.parametrize("kind", [TimeoutError, CheckpointError])
def test_nothing_is_said_of_a_shard_whose_last_holder_failed_after_its_attempt_had_ended(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """It hung until the time of the lease was over, or had given the shard up for the next attempt."""
    fetching = fetcher(store, {1: 1}, lease=0.0)

    def fail(*arguments: object) -> object:
        fetching.stop()
        raise kind("no shard")

    monkeypatch.setattr(exchange, "connect", fail)
    with pytest.raises(AttemptEndedError):
        fetching.fetch(SHARD, [1])


def test_a_damaged_shard_of_the_own_pod_is_fetched(tmp_path: Path, serve: Callable[..., int]) -> None:
    own = damaged(tmp_path / "own")
    own.keep_only(SHARD.checkpoint, attempt="second")
    fetcher(own, {1: serve(holding(tmp_path / "good"))}).fetch(SHARD, [0, 1])
    path = own.path(SHARD)
    assert path
    assert path.read_bytes()[DATA_BEGIN + SIZE // 2] == 0


@pytest.fixture
def partner(tmp_path: Path, serve: Callable[..., int]) -> Iterator[Partner]:
    """A partner that holds what it gets."""
    copies = ShardStore(tmp_path / "copies", 1 << 30)
    copies.keep_only(None, attempt="first")
    copies.reserve("first", {0: SIZE + 4096}, 1)
    other = Partner(SETTINGS, holding(tmp_path / "own"), (1, ("127.0.0.1", serve(copies))), print)
    yield other
    other.stop()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[exchange.Peer]:
    """The connections that are made."""
    made: list[exchange.Peer] = []
    connect = exchange.connect

    def kept(*arguments: object) -> exchange.Peer:
        made.append(connect(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(exchange, "connect", kept)
    return made


def test_a_save_goes_on_with_the_connection_of_the_save_before(
    partner: Partner, connections: list[exchange.Peer]
) -> None:
    assert [partner.send(SHARD) for _ in range(3)] == [True] * 3
    assert len(connections) == 1


def test_a_connection_that_was_not_used_for_long_is_made_anew(
    partner: Partner, connections: list[exchange.Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partner may have closed it, or what is between the pods may have forgotten it."""
    now = exchange.time.monotonic
    assert partner.send(SHARD)
    monkeypatch.setattr(exchange.time, "monotonic", lambda: now() + SETTINGS.lease)
    assert partner.send(SHARD)
    assert len(connections) == 2


def test_a_connection_that_broke_between_two_saves_is_made_anew(
    partner: Partner, connections: list[exchange.Peer]
) -> None:
    assert partner.send(SHARD)
    connections[0].interrupt()
    assert partner.send(SHARD)
    assert len(connections) == 2


PARTNERS_SHARD = ShardId(CheckpointId("a1b2", 7, 2, 1), 1)


class Partners:
    """A partner that cannot be reached because of ``error``, and the time that passes meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, error: Exception) -> None:
        self.now, self.waits, self.tries, self.lines = 1000.0, [0.0][:0], 0, [""][:0]
        self._error = error
        monkeypatch.setattr(module, "connect", self._connect)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self._sleep)
        settings = Settings(("train.py",), lease=15.0)
        self.partner = Partner(settings, ShardStore(folder, 1 << 20), (1, ("10.0.0.2", 80)), self.lines.append)

    def _connect(self, *arguments: object) -> None:
        self.tries += 1
        raise self._error

    def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def test_a_partner_of_another_version_is_named_once_and_not_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = Partners(monkeypatch, tmp_path, VersionError("it speaks version 3 of flk's protocol"))
    for _ in range(3):
        assert not other.partner.send(PARTNERS_SHARD)
    assert (other.tries, other.waits) == (1, [])
    other.now += 3600
    assert not other.partner.send(PARTNERS_SHARD)
    assert len(other.lines) == 1
    assert "version 3" in other.lines[0]


def test_a_partner_that_does_not_answer_is_tried_less_and_less_often_for_a_lease(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = Partners(monkeypatch, tmp_path, ConnectionRefusedError(111, "Connection refused"))
    assert not silent.partner.send(PARTNERS_SHARD)
    assert silent.now >= 1015
    assert silent.waits[0] < silent.waits[-1] <= 1.5
    assert len(set(silent.waits)) == len(silent.waits)  # a part of each is random
    before = silent.tries
    silent.now += 1
    assert not silent.partner.send(PARTNERS_SHARD)
    assert silent.tries == before  # a pause
    silent.now += 3600
    assert not silent.partner.send(PARTNERS_SHARD)
    assert silent.tries > before
    assert len(silent.lines) == 1


def test_saves_do_not_wait_a_lease_each_for_a_partner_that_was_not_reached_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = Partners(monkeypatch, tmp_path, ConnectionRefusedError(111, "Connection refused"))
    assert not silent.partner.send(PARTNERS_SHARD)
    for _ in range(3):
        silent.now += 31
        before = silent.tries, silent.now
        assert not silent.partner.send(PARTNERS_SHARD)
        assert (silent.tries, silent.now) == (before[0] + 1, before[1])
