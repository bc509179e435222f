"""TailReader: reads the last lines of pods that have ended, for the archive of a job whose log is not followed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Final

from flk.errors import FlkError
from flk.jobs.archive_writer import LINES_OF_A_POD, ArchiveWriter
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.pods import container_status
from flk.observe.pool import ReadPool
from flk.observe.stamps import split_stamp

MAX_PODS: Final = 64  # pods of one job whose logs are read: failed pods before successful ones
IDLE: Final = 5.0  # seconds without a byte after which a log is given up


class TailReader:
    """Reads each pod's log once, in the threads of a pool, when its container has ended."""

    def __init__(self, client: JobClient, writer: ArchiveWriter, pool: ReadPool) -> None:
        self._client, self._writer, self._pool = client, writer, pool
        self._read: set[str] = set()  # UIDs of the pods
        self._pending: list[Future[None]] = []

    def consider(self, pods: Sequence[Object]) -> None:
        """Read the logs of the pods that have ended since the last call."""
        ended = [(code, pod) for pod in pods if (code := _exit_code(pod)) is not None]
        for _, pod in sorted(ended, key=lambda item: item[0] == 0):
            uid = pod["metadata"]["uid"]
            if uid not in self._read and len(self._read) < MAX_PODS:
                self._read.add(uid)
                self._pending.append(self._pool.submit(self._read_tail, pod))

    def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for what is being read."""
        wait(self._pending, timeout)

    def _read_tail(self, pod: Object) -> None:
        try:
            with self._client.stream_log(pod, IDLE, tailLines=LINES_OF_A_POD[1], timestamps=True) as lines:
                read = [split_stamp(line) for line in lines]
        except FlkError:
            return  # the log is gone already; the record of the launcher may hold its end
        self._writer.set_lines(pod["metadata"]["name"], read)


def _exit_code(pod: Object) -> int | None:
    """Return the exit code of the training container, None while it runs."""
    ended = (container_status(pod).get("state") or {}).get("terminated") or {}
    return ended.get("exitCode")
