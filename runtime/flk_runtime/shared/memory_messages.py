"""Messages about checkpoints in memory between a rank and the launcher of its pod, on a Unix socket.

A rank introduces itself with `Rank`. Each further message of a rank is a request, and the launcher sends one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, get_args

from flk_runtime.wire import Done, Failed, Registry, Session


class SaveKey(NamedTuple):
    """One save of an attempt, the same on all ranks. Several saves may be after the same step."""

    step: int
    number: int  # of the save in the attempt


@dataclass(frozen=True)
class Rank:
    """First message of a connection: the rank that has opened it."""

    attempt: int
    rank: int


@dataclass(frozen=True)
class Reserve:
    """Make room for the shards that this pod will hold. The answer is `Files`: the files of this rank.

    ``sizes`` are the bytes of the shards of all ranks of the attempt, or of this rank alone if its shard has grown.
    ``counts_third``: each rank of the pod may need a third file, since storage may still read the shard of an earlier
    save, and there has to be room for it. ``third``: it is needed now.
    """

    sizes: dict[int, int]
    counts_third: bool = False
    third: bool = False


@dataclass(frozen=True)
class Release:
    """Nothing will be saved in memory, because a pod has no room: give the files up. The answer is `Done`."""


@dataclass(frozen=True)
class Finish:
    """The shard in this file is written: seal it, and have the partner replicate it.

    The answer is `Done`, also where no partner takes a copy.
    """

    path: str
    whole: SaveKey | None  # the latest checkpoint of this attempt that all pods hold; None: there is none


@dataclass(frozen=True)
class GetRestorable:
    """Ask which checkpoint is restored. The answer is `ToRestore`."""


@dataclass(frozen=True)
class GetFile:
    """Ask for the file of the shard that ``rank`` wrote. The answer is `Files`.

    It is fetched from another pod if a rank of this pod reads it. Else this pod may hold a copy.
    """

    rank: int


@dataclass(frozen=True)
class Restored:
    """This rank has restored all it needs. The answer is `Done`."""


@dataclass(frozen=True)
class Files:
    """Paths of files of shards."""

    paths: list[str]


@dataclass(frozen=True)
class Restorable:
    """A whole checkpoint in the memory of the pods."""

    step: int
    readers: list[int]  # the rank that reads each shard, by the rank that wrote it
    doubtful: bool = False  # an earlier attempt could not read it
    processes: int = 1  # ranks of each pod
    copies: list[int] = field(default_factory=list)  # shards that ranks of other pods read, and this pod holds too

    def is_preferred_to(self, stored: int) -> bool:
        """Whether it is restored in the place of a stored checkpoint after step ``stored``."""
        return self.step >= stored and not self.doubtful


@dataclass(frozen=True)
class ToRestore:
    """The checkpoint that is restored; None: there is none."""

    checkpoint: Restorable | None


Request = Reserve | Release | Finish | GetRestorable | GetFile | Restored
Answer = Done | Failed | Files | ToRestore
MESSAGES: Final[Registry[Rank | Request | Answer]] = Registry([Rank, *get_args(Request), *get_args(Answer)])


def session(*, serves: bool) -> Session:
    """One end of a connection. Every process that can open the socket may use it, so there is no secret."""
    return Session("", ["memory"], serves=serves, other="the rank" if serves else "the launcher")
