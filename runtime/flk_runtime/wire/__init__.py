"""The transport of flk: authenticated messages and bulk data between launchers, ranks and workers.

- `session`: both ends greet each other with the version of the protocol, agree on a key, and authenticate each frame
- `registry`: a set of messages, each a dataclass, and how they travel as JSON
- `connection`: a non-blocking end of a connection, for a loop that serves many; how long an end may be silent, and the
  delays between two tries to connect
- `stream`: a blocking end, for threads, which also carries bulk data
- `listener`: a socket that listens on IPv6 and IPv4, and how its connections are accepted
- `acceptor`: hands over the connections whose other ends belong to the job; all strangers together have limits

A frame is the lengths of a message and of its bulk data, the message, and an authentication code. The bulk data follows
with a code of its own. Nothing is encrypted here.

The rendezvous (`flk_runtime.launcher.transport`), the replication of checkpoints (`flk_runtime.launcher.replication`),
the requests of ranks (`flk_runtime.shared.memory_messages`) and DiLoCo (`flk_diloco`) are sets of messages.
"""

from flk_runtime.wire.acceptor import Acceptor
from flk_runtime.wire.connection import BEATS, LEASE, Backoff, Connection, was_closed
from flk_runtime.wire.listener import accept, listen, serve
from flk_runtime.wire.registry import Done, Failed, MessageError, Refused, Registry
from flk_runtime.wire.session import Session, StrangerError, VersionError
from flk_runtime.wire.stream import Stream, reason

__all__ = [
    "BEATS",
    "LEASE",
    "Acceptor",
    "Backoff",
    "Connection",
    "Done",
    "Failed",
    "MessageError",
    "Refused",
    "Registry",
    "Session",
    "StrangerError",
    "Stream",
    "VersionError",
    "accept",
    "listen",
    "reason",
    "serve",
    "was_closed",
]
