"""TensorBoard: event files in a folder of the run."""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from flk_sinks.sink import Row, RunInfo

_TIME: Final = re.compile(r"events\.out\.tfevents\.(\d{10})\.")  # in the name of a file


class TensorBoard:
    """Writes event files to PLACE/RUN. Readers drop what an earlier attempt has written after the resumed step."""

    title = "TensorBoard"

    def __init__(self, run: RunInfo, place: str) -> None:
        self._run = run
        self._folder = f"{place.rstrip('/')}/{run.id}"
        self._file: Any = None
        self._files = 0  # of this process
        self._newest = 0  # the largest step that this process has written

    def open(self) -> None:
        from tensorboard.compat import tf
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # What a failed write may have left in the file before is purged, and written again.
        first = 1 + max(self._newest, self._run.resumed)
        tf.io.gfile.makedirs(self._folder)
        number = f"{socket.gethostname()}.{os.getpid()}.{self._files}"
        name = f"events.out.tfevents.{_next_time(self._folder):010d}.{number}"
        self._files += 1
        self._file = tf.io.gfile.GFile(f"{self._folder}/{name}", "wb")
        now = time.time()
        self._put(
            [
                Event(wall_time=now, file_version="brain.Event:2"),
                Event(wall_time=now, step=first, session_log=SessionLog(status=SessionLog.START)),
            ]
        )

    def describe(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import hparams

        summaries = hparams(self._run.described, {"loss": 0})  # type: ignore[no-untyped-call]
        self._put([Event(wall_time=time.time(), summary=each) for each in summaries])

    def write(self, rows: Sequence[Row]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all values of a row: one for each takes several times as long.
        self._put(
            [
                Event(
                    wall_time=row.time,
                    step=row.step,
                    summary=Summary(
                        value=[Summary.Value(tag=tag, simple_value=each) for tag, each in row.values.items()]
                    ),
                )
                for row in rows
            ]
        )
        self._newest = max([self._newest, *(row.step for row in rows)])

    def close(self, ended: str) -> None:
        self._file.close()

    def _put(self, events: Sequence[Any]) -> None:
        """Write events at once: TensorBoard's own writer hands each to a thread, which opens the file for it."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            writer.write(event.SerializeToString())
        self._file.write(records.getvalue())
        self._file.flush()


def _next_time(folder: str) -> int:
    """The time in the name of a new file. Readers take files by their names: it is later than in those that exist.

    An attempt may begin in the same second as the one before it, or on a node whose clock is behind.
    """
    from tensorboard.compat import tf

    names = [file.rpartition("/")[2] for file in tf.io.gfile.glob(f"{folder}/events.out.tfevents.*")]
    return max([int(time.time()), *(1 + int(found[1]) for name in names if (found := _TIME.match(name)))])
