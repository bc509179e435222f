"""Output of the launcher: a thread writes it, so that a stalled reader blocks neither signals nor the rendezvous."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from flk_runtime.system import host

_FULL = 1 << 20  # bytes that wait to be written, above which the ranks' output is no longer read
_FREE = _FULL // 4  # bytes below which it is read again
_LIMIT = 1 << 24  # bytes above which output is dropped: ranks of many attempts may have left that much
_CHUNK = 1 << 16  # bytes of one write
_RECENT = 30  # latest writes that are kept; each holds whole lines


class Output:
    """Standard output and standard error of this process, in the order in which they are written."""

    def __init__(self, stdout: int, stderr: int, has_room: Callable[[], None]) -> None:
        """Start the thread. ``has_room`` is called, in that thread, when ``is_full`` becomes false."""
        self._stdout = stdout
        self._stderr = stderr
        self._has_room = has_room
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()  # descriptor and data
        self._size = 0  # bytes that wait or are being written
        self._dropped = 0  # bytes
        self._recent: collections.deque[bytes] = collections.deque(maxlen=_RECENT)
        self._changed = threading.Condition()
        self.is_full = False
        """Whether the buffer is full; callers that can block should wait."""
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def write_stdout(self, data: bytes) -> None:
        """Write to standard output, later if it does not take the data now."""
        self._put(self._stdout, data)

    def write_stderr(self, data: bytes) -> None:
        """Write to standard error, later if it does not take the data now."""
        self._put(self._stderr, data)

    def flush(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until everything is written. Returns whether everything is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._size == 0, timeout)

    def last_lines(self, number: int) -> list[str]:
        """Return the last lines that were given to this object, at most ``number``, from any thread."""
        with self._changed:
            pieces = list(self._recent)
        return b"".join(pieces).decode(errors="replace").splitlines()[-number:]

    def _put(self, fd: int, data: bytes) -> None:
        with self._changed:
            self._recent.append(data)
            if self._size + len(data) > _LIMIT:
                self._dropped += len(data)
                return
            if self._dropped:
                note = f"flk: {self._dropped} bytes of output are missing here: nobody read it in time\n".encode()
                self._waiting.append((self._stderr, note))
                self._size += len(note)
                self._dropped = 0
            self._waiting.append((fd, data))
            self._size += len(data)
            self.is_full = self.is_full or self._size > _FULL
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                fd, first = self._waiting.popleft()
                parts, size = [first], len(first)
                while self._waiting and self._waiting[0][0] == fd and size < _CHUNK:
                    parts.append(self._waiting.popleft()[1])
                    size += len(parts[-1])
            host.write_all(fd, b"".join(parts))
            with self._changed:
                self._size -= size
                has_room = self.is_full and self._size < _FREE
                self.is_full = self.is_full and not has_room
                self._changed.notify_all()
            if has_room:
                self._has_room()
