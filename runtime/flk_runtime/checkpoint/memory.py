"""A rank's side of checkpoints in memory: where it writes its part, and which parts it can restore.

The launcher holds the parts (`flk_runtime.launcher.replication`). A rank asks it on the Unix socket in FLK_MEMORY, on
one connection: a line of JSON for each request, and a line that answers it. When a part is finished, the rank goes on
and reads the answer later.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flk_runtime.contract import pod_env, user_env
from flk_runtime.errors import StorageError
from flk_runtime.shared.shard_file import PartHeader


@dataclass(frozen=True)
class Restorable:
    """A whole checkpoint in the memory of the pods."""

    step: int
    world_size: int  # number of its parts


class PodMemory:
    """Checkpoints in the memory of the pods, as one rank uses them. Only one thread may call the methods.

    To save: `reserve` once. Then write a part to the file at `path` and call `finish`. Before the next part, all ranks
    tell each other what `is_held` says, and call `settle`.
    """

    def __init__(self, path: str, attempt: int, rank: int) -> None:
        """``path`` is the launcher's socket."""
        self._address, self._attempt, self._rank = path, attempt, rank
        self._connection: socket.socket | None = None
        self._received = b""  # an answer that has not arrived as a whole
        self._waiting = False  # for the answer to `finish`
        self._answer: dict[str, Any] = {"error": "nothing was saved"}  # the latest one to `finish`
        self._paths: list[Path] = []  # of the two files for this rank's parts; the next part goes to the first
        self._size = 0  # bytes that each of them has
        self._latest = (-1, 0)  # step of the latest part, and the number of its save
        self._kept: tuple[int, int] | None = None  # these of the latest checkpoint of this attempt that all pods hold

    @classmethod
    def of_this_rank(cls, rank: int) -> PodMemory | None:
        """The memory of this rank's pod; None if its launcher keeps no checkpoints, or is not flk's."""
        path = os.environ.get(pod_env.MEMORY)
        return cls(path, user_env.ATTEMPT.read(os.environ), rank) if path else None

    # Saving

    def reserve(self, size: int) -> str:
        """Make room for parts of ``size`` bytes, with their headers. Returns why there is none; empty: there is."""
        answer = self._ask("reserve", size=size)
        if "error" in answer:
            return str(answer["error"])
        if not self._paths:
            self._paths = [Path(path) for path in answer["paths"]]
        self._size = size
        return ""

    @property
    def size(self) -> int:
        """The bytes that were reserved for a part."""
        return self._size

    @property
    def path(self) -> Path:
        """The file for this rank's next part. The other file may hold the latest whole checkpoint."""
        return self._paths[0]

    def finish(self, step: int, number: int) -> None:
        """Have the launcher hold the part in the file at `path`, and copy it to another pod. Returns at once.

        ``step`` and ``number`` are those of the part.
        """
        self._latest = (step, number)
        self._send("finish", path=str(self.path), keep=self._kept)
        self._waiting = True

    def is_held(self, *, wait: bool) -> bool | None:
        """Whether this pod, and its partner if it can, hold the part that was finished last.

        None: it is not decided yet, and not to ``wait``. False also if none was finished, or `skip` was called. Raises
        CheckpointError if the launcher does not answer.
        """
        if self._waiting:
            answer = self._receive(wait=wait)
            if answer is None:
                return None
            self._answer = answer
        return "error" not in self._answer

    @property
    def refusal(self) -> str:
        """Why the part that was finished last is not held; empty if it is."""
        return str(self._answer.get("error", ""))

    def skip(self, why: str) -> None:
        """Note that this rank has no part of this checkpoint."""
        self._answer = {"error": why}

    def settle(self, *, whole: bool) -> None:
        """Go on to the next part. ``whole``: all ranks have said that their latest part is held.

        So the checkpoint is whole, and the next part goes to the file of the one before it. Else the next part replaces
        the latest one.
        """
        if whole:
            self._kept = self._latest
            self._paths.reverse()

    # Restoring

    def restorable(self) -> Restorable | None:
        """The checkpoint that all ranks of this attempt can restore, which is the same in all of them; or None."""
        answer = self._checked("restore")
        return Restorable(int(answer["step"]), int(answer["world_size"])) if answer else None

    def header(self, rank: int) -> PartHeader:
        """The header of the part that ``rank`` wrote. Raises CheckpointError if no pod can give it any more."""
        return PartHeader.from_json(self._checked("header", part=rank)["header"].encode())

    def open_part(self, rank: int) -> Path:
        """The file of the part that ``rank`` wrote, which the launcher gets from another pod if need be.

        It may be removed or written anew after `restored`. Raises CheckpointError if no pod can give it any more.
        """
        return Path(self._checked("part", part=rank)["path"])

    def restored(self) -> None:
        """Say that this rank has restored all it needs, so that parts of other pods need not be kept here."""
        self._ask("restored")

    # The connection

    def _checked(self, action: str, **values: Any) -> dict[str, Any]:
        answer = self._ask(action, **values)
        if "error" in answer:
            raise StorageError(f"checkpoints in memory: {answer['error']}")
        return answer

    def _ask(self, action: str, **values: Any) -> dict[str, Any]:
        self.is_held(wait=True)  # answers come in the order of the requests
        self._send(action, **values)
        answer = self._receive(wait=True)
        assert answer is not None  # noqa: S101
        return answer

    def _send(self, action: str, **values: Any) -> None:
        request = {"do": action, "attempt": self._attempt, "rank": self._rank, **values}
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX)
                self._connection.connect(self._address)
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise _unanswered(error) from error

    def _receive(self, *, wait: bool) -> dict[str, Any] | None:
        assert self._connection is not None  # noqa: S101
        try:
            while not self._received.endswith(b"\n"):
                data = self._connection.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
                if not data:
                    raise ConnectionError("it has ended")
                self._received += data
            answer: dict[str, Any] = json.loads(self._received)
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            raise _unanswered(error) from error
        self._received, self._waiting = b"", False
        return answer


def _unanswered(error: Exception) -> StorageError:
    return StorageError(f"the launcher does not answer about checkpoints in memory: {error}")
