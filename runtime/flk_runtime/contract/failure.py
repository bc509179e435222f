"""Failures of ranks and pods."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from flk_runtime.contract.exit_codes import ExitCode

_SOURCE_FILE = re.compile(r"\[[^\[\]\s]*\.(?:c|cc|cpp|cu|cuh|h|hpp):\d+\]\s*")  # of torch, on the machine that built it
_LINE_LIMIT = 300  # characters of a message in a line for people
_TIMEOUT = re.compile(r"(?i)tim(ed |e)out|Watchdog caught")  # a rank waited for a peer that still ran
# Exit code of a job that ends because of a failure of this kind; TRAINING for the others.
_CODES: Final = {
    **dict.fromkeys(
        ("oom", "lost", "preempted", "resized", "unkillable", "hang", "io", "disk_full", "gpu", "rendezvous"),
        ExitCode.INFRASTRUCTURE,
    ),
    "deadline": ExitCode.TIMEOUT,
    "usage": ExitCode.USAGE,
}
# Kinds whose message is a predicate of the pod or the rank, and the predicate where the message is empty.
_PREDICATES: Final = {
    "lost": "was lost",
    "preempted": "was preempted",
    "resized": "joined or left",
    "hang": "makes no progress",
}


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, or of a whole pod (``rank`` is None)."""

    # Of a rank: exception, exit, signal, oom, hang, and exceptions of a kind of their own: io, disk_full, gpu, address
    # (in use), rendezvous, usage. Of a pod: preempted (it had to stop), resized (it joins or leaves an elastic job),
    # lost (also: it never joined), unkillable, deadline, usage.
    kind: str
    pod: int
    rank: int | None = None
    pod_name: str = ""
    node: str = ""
    attempt: int = 0
    time: float = 0.0  # seconds since the epoch, by the clock of the pod's node
    type: str = ""  # class name of the exception
    message: str = (
        ""  # of the exception or the container; or a predicate of the pod, see _PREDICATES: "received SIGTERM"
    )
    traceback: str = ""  # its last characters
    exit_code: int | None = None
    signal: int | None = None
    secondary: bool = False  # a consequence of another rank's failure: the connection to the peer broke
    stderr: str = ""  # the last lines that the rank wrote to stderr
    count: int = 1  # number of ranks that failed in this way
    step: int | None = None  # optimizer steps that the rank had done; None if it does not tell (see shared.progress)

    @property
    def details(self) -> str:
        """The traceback of the exception, or the last lines on stderr of a rank that ended otherwise; may be empty."""
        return self.traceback or self.stderr

    @property
    def code(self) -> ExitCode:
        """Exit code of a job that ends because of this failure."""
        if self.is_lost_connection:
            return ExitCode.INFRASTRUCTURE
        return _CODES.get(self.kind, ExitCode.TRAINING)

    @property
    def is_lost_connection(self) -> bool:
        """Whether a rank lost its connection to a peer, which did not fail itself as far as is known."""
        return self.secondary and self.kind == "exception" and not _TIMEOUT.search(self.message)

    @property
    def summary(self) -> str:
        """One line that names the rank or the pod and says what happened to it."""
        subject = self.pod_name or f"pod {self.pod}"
        if self.rank is not None:
            subject = f"rank {self.rank} in {subject}"
        if self.count > 1:
            subject = f"{subject} and {self.count - 1} other {'rank' if self.count == 2 else 'ranks'}"
        first_line = _SOURCE_FILE.sub("", self.message.splitlines()[0])[:_LINE_LIMIT] if self.message else ""
        after = f" after step {self.step}" if self.step else ""
        if self.kind in ("exception", "io", "disk_full", "gpu", "address", "rendezvous"):
            return f"{subject} raised {self.type}{after}" + (f": {first_line}" if first_line else "")
        if self.kind in ("preempted", "resized") and self.node:
            subject = f"{subject} on {self.node}"
        if self.kind in _PREDICATES:
            return f"{subject} {first_line or _PREDICATES[self.kind]}"
        predicate = {
            "exit": f"ended with exit code {self.exit_code}" + ("" if self.exit_code else " before the other ranks"),
            "signal": f"was killed by {_signal_name(self.signal)}",
            "oom": "ran out of memory (killed by the kernel at the container's memory limit)",
            "deadline": "reached the job's deadline",
            "usage": "could not start",
            "unkillable": "has a rank that survives SIGKILL",
        }.get(self.kind, self.kind)
        return f"{subject} {predicate}{after}" + (f": {first_line}" if first_line else "")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Failure:
        """The failure from the result of ``dataclasses.asdict``; ignores fields that a newer version has added."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


# Exceptions of a rank that lost the connection to a peer: they come from gloo, NCCL or the store. An OSError is none of
# them, since it comes from a socket or a pipe that the script has opened itself.
_SECONDARY_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_TORCH_TYPES = frozenset({"", "RuntimeError"})  # of exceptions whose text tells; empty: lines of stderr
_SECONDARY_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "Watchdog caught collective",
    "recvValue failed",
    "sendBytes failed",
)


def is_secondary(type_name: str, message: str) -> bool:
    """Return whether an exception says that the connection to a peer broke, so that it is not the root cause."""
    if type_name in _SECONDARY_TYPES:
        return True
    return type_name in _TORCH_TYPES and any(word in message for word in _SECONDARY_WORDS)


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
