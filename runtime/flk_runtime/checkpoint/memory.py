"""A rank's side of checkpoints in memory: where it writes its part, and which parts it can restore.

The launcher holds the parts (`flk_runtime.launcher.memory`). A rank asks it on the Unix socket in FLK_MEMORY: one line
of JSON, and one line that answers it, on a connection for each request. Any thread may call the methods.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flk_runtime import contract
from flk_runtime.errors import CheckpointError
from flk_runtime.system.part import PartHeader


@dataclass(frozen=True)
class Restorable:
    """A whole checkpoint in the memory of the pods."""

    step: int
    world_size: int  # number of its parts


class PodMemory:
    """Checkpoints in the memory of the pods, as one rank uses them."""

    def __init__(self, path: str, attempt: int, rank: int) -> None:
        """``path`` is the launcher's socket."""
        self._path, self._attempt, self._rank = path, attempt, rank

    @classmethod
    def of_this_rank(cls, rank: int) -> PodMemory | None:
        """The memory of this rank's pod; None if its launcher keeps no checkpoints, or is not flk's."""
        path = os.environ.get(contract.MEMORY)
        return cls(path, int(os.environ.get(contract.ATTEMPT, "0")), rank) if path else None

    # Saving

    def reserve(self, size: int) -> str:
        """Make room for parts of ``size`` bytes, with their headers. Returns why there is none; empty: there is."""
        return str(self._ask("reserve", size=size).get("error", ""))

    def begin(self, step: int, size: int) -> Path | None:
        """The file for this rank's part of the checkpoint after ``step``, of about ``size`` bytes.

        It is one of two files that are used in turn. Waits until all pods hold the checkpoint before the last one.
        None: this checkpoint cannot be kept. End it with `finish` or `cancel`.
        """
        path = self._ask("begin", step=step, size=size).get("path")
        return Path(path) if path else None

    def finish(self, step: int, world_size: int, path: Path) -> None:
        """Say that the part in the file is whole: the launcher copies it to another pod, and this rank goes on."""
        self._checked("finish", step=step, world_size=world_size, path=str(path))

    def cancel(self, step: int, path: Path) -> None:
        """Say that the part could not be written, so that no pod keeps this checkpoint."""
        self._ask("cancel", step=step, path=str(path))

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

    def _checked(self, action: str, **values: Any) -> dict[str, Any]:
        answer = self._ask(action, **values)
        if "error" in answer:
            raise CheckpointError(f"checkpoints in memory: {answer['error']}")
        return answer

    def _ask(self, action: str, **values: Any) -> dict[str, Any]:
        request = {"do": action, "attempt": self._attempt, "rank": self._rank, **values}
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self._path)
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as reader:
                    answer: dict[str, Any] = json.loads(reader.readline())
                    return answer
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the launcher does not answer about checkpoints in memory: {error}") from None
