"""Snapshot: the activity of a rank at one moment, as data that launchers send to each other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from flk_runtime.shared.observer import Pending

FRAMES: Final = 40  # of one thread that are kept, from the innermost one
OTHER_THREADS: Final = 6  # beside the main thread


class Frame(NamedTuple):
    """One call on a Python stack."""

    file: str
    line: int
    function: str
    text: str = ""  # the line of source

    @property
    def place(self) -> str:
        """File, line and function."""
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function != "<module>" else "")

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.text else self.place


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank, its stacks and its collectives."""

    rank: int
    pod: int
    pod_name: str = ""
    node: str = ""
    state: str = ""  # of the process, as in /proc: R runs, S sleeps, D waits for a device, T is stopped
    main: tuple[Frame, ...] = ()  # stack of the main thread, innermost call first; empty if it could not be read
    threads: tuple[tuple[Frame, ...], ...] = ()  # stacks of other threads
    workers: tuple[tuple[Frame, ...], ...] = ()  # main threads of processes that the rank has started
    native: str = ""  # stack with native calls, where py-spy is installed
    answers: bool = True  # the rank's observer answered: no native code holds Python's lock (GIL)
    groups: Mapping[str, int] = field(default_factory=dict)  # number of the latest collective of each group
    pending: tuple[Pending, ...] = ()
    step: int = -1  # -1: unknown
    idle: float = 0.0  # seconds since the rank's last sign of progress

    @property
    def key(self) -> str:
        """A hash that is equal for ranks which do the same at the same place."""
        where = [self.state == "T", [frame[:3] for frame in self.main], [str(each) for each in self.pending[:1]]]
        return hashlib.sha256(repr(where).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """The snapshot for JSON."""
        return asdict(self)
