"""Messages between the workers and the hub. Outer gradients, averages and parameters follow them as bulk data."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, get_args

from flk_runtime.wire import BEATS, Refused, Registry, Session, Stream


@dataclass(frozen=True)
class Hello:
    """First message of a worker: its model, its options, and how far it is."""

    worker: int
    layout: dict[str, Any]  # model and options, which all workers have in common
    version: int  # of the parameters that it has
    digest: str  # of its parameters before its first round; empty after it
    incarnation: str  # of its process


@dataclass(frozen=True)
class Contribution:
    """The outer gradient of a worker for the round that makes ``version``."""

    version: int


@dataclass(frozen=True)
class Parameters:
    """All parameters of a worker, which the hub has asked for."""

    version: int


@dataclass(frozen=True)
class Bye:
    """This worker has finished."""


@dataclass(frozen=True)
class Alive:
    """The sender lives."""


@dataclass(frozen=True)
class Begin:
    """Rounds begin, with ``workers`` workers: send contributions."""

    workers: int


@dataclass(frozen=True)
class Give:
    """Another worker needs all parameters: send them."""


@dataclass(frozen=True)
class CatchUp:
    """All parameters of another worker, for a worker that is behind."""

    version: int
    workers: int
    joins: bool  # the receiver takes part at once; else after the result that says so


@dataclass(frozen=True)
class Result:
    """The average that makes ``version``."""

    version: int
    workers: int
    joins: bool  # the receiver takes part from here on


FromWorker = Hello | Contribution | Parameters | Bye | Alive
FromHub = Refused | Begin | Give | CatchUp | Result | Alive
Message = FromWorker | FromHub
MESSAGES: Final[Registry[Message]] = Registry(get_args(Message))
Peer = Stream[Message]
Data = bytes | bytearray


def send_queued(peer: Peer, items: SimpleQueue[Any], lease: float) -> None:
    """Send messages until one is None or the connection ends, and that this end is there when there are none."""
    with contextlib.suppress(OSError):
        while True:
            try:
                item = items.get(timeout=lease / BEATS)
            except Empty:
                item = (Alive(), b"")
            if item is None:
                break
            peer.send(*item)
    peer.close()


def session(secret: str, *, serves: bool) -> Session:
    """One end of a connection between a worker and the hub."""
    return Session(secret, ["diloco"], serves=serves, other="the worker" if serves else "the hub")
