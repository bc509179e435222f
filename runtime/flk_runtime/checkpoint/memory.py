"""A rank's side of checkpoints in memory: where it writes its shard, and which shards it can restore.

The launcher holds the shards (`flk_runtime.launcher.replication`). A rank asks it on the Unix socket in FLK_MEMORY,
with the messages of `flk_runtime.shared.memory_messages`. When a shard is finished, the rank goes on and reads the
answer later.
"""

from __future__ import annotations

import select
import socket
from pathlib import Path
from typing import TypeVar

from flk_runtime.errors import StorageError
from flk_runtime.shared import memory_messages as messages
from flk_runtime.shared.memory_messages import Answer, Files, Request, Restorable, SaveKey, ToRestore
from flk_runtime.wire import Failed, Stream, VersionError

__all__ = ["PodMemory", "Restorable", "SaveKey"]

T = TypeVar("T", Files, ToRestore)


class PodMemory:
    """Checkpoints in the memory of the pods, as one rank uses them. Only one thread may call the methods.

    To save: `reserve` once. Then write a shard to the file that `next_path` names and call `finish`. Before the next
    shard, all ranks tell each other the result of `is_held`, and call `settle`.
    """

    def __init__(self, path: str, attempt: int, rank: int) -> None:
        """``path`` is the launcher's socket."""
        self._address, self._attempt, self._rank = path, attempt, rank
        self._stream: Stream[messages.Rank | Request | Answer] | None = None
        self._poll = select.poll()  # whether an answer has arrived
        self._waiting = False  # for the answer to `finish`
        self._answer: Answer = Failed("nothing was saved")  # the latest one to `finish`
        self._paths: list[Path] = []  # of the files for this rank's shards; the last one holds the latest whole one
        self._counts_third = self._third = False  # there is room for a third one; there are three of them
        self.size = 0
        """The bytes that were reserved for a shard."""
        self._path: Path | None = None  # of the latest shard
        self._latest: SaveKey | None = None  # of the latest shard
        self._kept: SaveKey | None = None  # of this attempt's latest checkpoint that all pods hold

    # Saving

    def reserve(self, sizes: dict[int, int], *, counts_third: bool = False) -> str:
        """Make room for shards of so many bytes, with their headers. Returns why there is no room; empty: there is.

        ``sizes`` are of all ranks, or of this rank alone if its shard has grown. ``counts_third``: there has to be room
        for a third file beside the two, for `add_third`. Call it when all ranks have restored, since older checkpoints
        give way.
        """
        self._counts_third = counts_third or self._counts_third
        return self._reserve(sizes)

    def add_third(self) -> None:
        """Have three files and not two, so that one more can be read meanwhile, if there is room after all."""
        self._third = True
        self._third = not self._reserve({self._rank: self.size})

    def _reserve(self, sizes: dict[int, int]) -> str:
        answer = self._ask(messages.Reserve(sizes, self._counts_third, self._third))
        if isinstance(answer, Files):
            self._paths = [*(path for each in answer.paths if (path := Path(each)) not in self._paths), *self._paths]
            self.size = sizes[self._rank]
        return _reason(answer)

    def release(self) -> None:
        """Give up the reserved memory, because another pod has no room."""
        self._ask(messages.Release())
        self._paths, self._counts_third, self._third = [], False, False

    def next_path(self, read: Path | None = None) -> Path:
        """The file for this rank's next shard: not the latest whole one's, and not ``read`` if there is another one."""
        return next((path for path in self._paths[:-1] if path != read), self._paths[0])

    def finish(self, save: SaveKey, path: Path) -> None:
        """Have the launcher hold the shard in this file, and copy it to another pod. Returns at once."""
        self._latest, self._path = save, path
        self._send(messages.Finish(str(path), self._kept))
        self._waiting = True

    def is_held(self, *, wait: bool) -> bool | None:
        """Whether this pod, and its partner if it can, hold the shard that was finished last.

        None: it is not known yet, and ``wait`` is false. False also if none was finished, or `skip` was called. Raises
        CheckpointError if the launcher does not answer.
        """
        if self._waiting:
            if not wait and not self._poll.poll(0):
                return None
            self._answer = self._receive()
        return not self.refusal

    @property
    def refusal(self) -> str:
        """Why the shard that was finished last is not held; empty if it is."""
        return _reason(self._answer)

    def skip(self, why: str) -> None:
        """Note that this rank has no shard of this checkpoint."""
        self._answer = Failed(why)

    def settle(self, *, whole: bool) -> None:
        """Go on to the next shard. ``whole``: all ranks have said that their latest shard is held.

        If so, the checkpoint is whole, and its file stays until the next one is. Else the next shard may replace it.
        """
        if whole and self._path:
            self._kept = self._latest
            self._paths.remove(self._path)
            self._paths.append(self._path)

    # Restoring

    def restorable(self) -> Restorable | None:
        """The checkpoint that all ranks of this attempt can restore, the same in all of them; None: there is none."""
        return self._checked(messages.GetRestorable(), ToRestore).checkpoint

    def open_shard(self, rank: int) -> Path:
        """The file of the shard that ``rank`` wrote, which the launcher gets from another pod if need be.

        It may be written anew when something has been saved. Raises CheckpointError if no pod can give it any more.
        """
        return Path(self._checked(messages.GetFile(rank), Files).paths[0])

    def restored(self) -> None:
        """Say that this rank has restored all it needs."""
        self._ask(messages.Restored())

    # The connection

    def _checked(self, request: Request, kind: type[T]) -> T:
        answer = self._ask(request)
        if isinstance(answer, kind):
            return answer
        raise StorageError(f"checkpoints in memory: {_reason(answer)}")

    def _ask(self, request: Request) -> Answer:
        self.is_held(wait=True)  # answers come in the order of the requests
        self._send(request)
        return self._receive()

    def _send(self, request: Request) -> None:
        try:
            if self._stream is None:
                sock = socket.socket(socket.AF_UNIX)
                try:
                    sock.connect(self._address)
                except OSError:
                    sock.close()
                    raise
                self._poll.register(sock, select.POLLIN)
                self._stream = Stream(sock, messages.session(serves=False), messages.MESSAGES, timeout=None)
                self._stream.send(messages.Rank(self._attempt, self._rank))
            self._stream.send(request)
        except VersionError:
            raise
        except OSError as error:
            raise _unanswered(error) from error

    def _receive(self) -> Answer:
        assert self._stream is not None  # noqa: S101
        try:
            answer, _ = self._stream.receive()
        except OSError as error:
            raise _unanswered(error) from error
        assert isinstance(answer, Answer)  # noqa: S101
        self._waiting = False
        return answer


def _reason(answer: Answer) -> str:
    return answer.reason if isinstance(answer, Failed) else ""


def _unanswered(error: Exception) -> StorageError:
    return StorageError(f"the launcher does not answer about checkpoints in memory: {error}")
