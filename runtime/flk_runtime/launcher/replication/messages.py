"""Messages about shards of checkpoints between two launchers, on connections of their own.

A large shard on such a connection delays neither heartbeats nor signals. Each message of the end that connects is a
request, and the other end sends one answer.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar, get_args

from flk_runtime.errors import StorageError
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.shard_file import DATA_BEGIN, ShardError, ShardPreamble, check_data
from flk_runtime.system.checksum import crc32
from flk_runtime.wire import Done, Failed, Registry, Stream

_CONNECT_TIMEOUT: Final = 3.0  # seconds


@dataclass(frozen=True)
class Put:
    """Hold the copy of a shard that follows. The answer is `Done`."""

    shard: ShardId
    keep: CheckpointId | None  # the latest checkpoint of the attempt that is known to be whole


@dataclass(frozen=True)
class Get:
    """Ask for a shard. The answer is `Content`."""

    shard: ShardId


@dataclass(frozen=True)
class Content:
    """The shard that was asked for follows."""


Request = Put | Get
Answer = Done | Failed | Content
MESSAGES: Final[Registry[Request | Answer]] = Registry([*get_args(Request), *get_args(Answer)])
Peer = Stream[Request | Answer]
T = TypeVar("T", Done, Content)


class RefusedError(StorageError, ConnectionError):
    """The other launcher refuses a request; a repetition does not help."""


def connect(address: tuple[str, int], settings: Settings) -> Peer:
    """Connect to the launcher at ``address``. Raises OSError, as the methods of the stream do."""
    sock = socket.create_connection(address, timeout=min(_CONNECT_TIMEOUT, settings.lease))
    session = settings.session("replication", serves=False, other="the launcher at this address")
    return Stream(sock, session, MESSAGES, settings.lease)


def expect(peer: Peer, kind: type[T]) -> tuple[T, int]:
    """The answer of the other launcher and the length of the shard that follows. Raises RefusedError for `Failed`."""
    answer, length = peer.receive()
    if isinstance(answer, Failed):
        raise RefusedError(answer.reason)
    if not isinstance(answer, kind):
        raise RefusedError(f"answered {type(answer).__name__} instead of {kind.__name__}")
    return answer, length


def receive_shard(
    peer: Peer, memory: mmap.mmap, length: int, arrived: Callable[[], None] = lambda: None
) -> ShardPreamble:
    """Receive a shard of ``length`` bytes into its file, all but its preamble, which is returned.

    ``arrived`` is called now and then as bytes arrive.

    Raises ShardError if it is no shard, or its data was damaged before it was sent. The connection can be used then.
    """
    beginning = bytearray(min(length, DATA_BEGIN))
    checksum = 0
    with memoryview(beginning) as begin, memoryview(memory) as view, view[len(beginning) : length] as data:
        for piece in peer.receive_data(begin, data):
            arrived()
            if piece.obj is not beginning:
                checksum = crc32(piece, checksum)
    preamble = ShardPreamble.from_bytes(bytes(beginning))
    if preamble.end != length:
        raise ShardError(f"it has {length} of its {preamble.end} bytes")
    check_data(preamble, checksum)
    return preamble
