"""ConnectionOptions: the options of a command line for all connections, as kubectl's global flags have them.

They are set once, before the first connection, and hold for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flk.commands import Connection
from flk.kube.resources import RequestTarget


@dataclass(frozen=True)
class Exchange:
    """A request and its outcome, without headers and answers, which may hold secrets."""

    verb: str
    target: RequestTarget
    query: Mapping[str, Any]
    body: Any
    method: str
    url: str
    outcome: str  # the HTTP status, or the error of the connection
    seconds: float  # until the answer's first byte


@dataclass(frozen=True)
class ConnectionOptions:
    """Options of all connections of this process."""

    connection: Connection = field(default_factory=Connection)  # --context is not in it: each client has its own
    request_timeout: float | None = None  # seconds for one request with all its attempts; 0: no limit of flk's own
    observe: Callable[[Exchange], None] | None = None  # called after each request, in the thread that sent it


_options = ConnectionOptions()


def connection_options() -> ConnectionOptions:
    """Return the options of this process."""
    return _options


def set_connection_options(options: ConnectionOptions) -> None:
    """Set the options of connections that are opened from now on."""
    global _options
    _options = options
