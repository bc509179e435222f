"""TensorBoard: event files in a folder of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from flk_runtime.sinks.sink import Row, RunInfo, Written


class TensorBoard:
    """Writes event files to PLACE/RUN. Readers drop what an earlier attempt has written after the resumed step."""

    title = "TensorBoard"
    settles = 0.0

    def __init__(self, run: RunInfo, place: str) -> None:
        self._run = run
        self._folder = f"{place.rstrip('/')}/{run.id}"
        self._writer: Any = None
        self._newest: list[Row] = []  # rows of the newest step, if this process has written any
        self._earlier: Written | None = None  # what earlier attempts have written up to the resumed step

    def open(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        again = self._newest
        first = again[0].step if again else self._run.resumed + 1
        # What could not be flushed is written again, to a file of its own: the purge takes it from the one before.
        self._writer = SummaryWriter(self._folder, purge_step=first, flush_secs=86400)
        self._write(again)

    def describe(self) -> None:
        from torch.utils.tensorboard.summary import hparams

        known = {f"flk.{name}": value for name, value in self._run.settings.items()} | self._run.hyperparameters
        for summary in hparams(known, {"loss": 0}):  # type: ignore[no-untyped-call]
            self._writer._get_file_writer().add_summary(summary)
        self._writer.flush()

    def write(self, rows: Sequence[Row]) -> None:
        # An evaluation after the resumed step may be done again, or not.
        if any(row.step <= self._run.resumed for row in rows):
            self._earlier = self._earlier or Written(_written(self._folder, self._run.resumed))
            rows = self._earlier.missing(rows)
        self._write(rows)
        for row in rows:
            if self._newest and self._newest[0].step != row.step:
                self._newest = []
            self._newest.append(row)

    def close(self, ended: str) -> None:
        self._writer.close()

    def _write(self, rows: Sequence[Row]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        file = self._writer._get_file_writer()
        for row in rows:  # one event for all values: add_scalar makes one for each, which takes several times as long
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            file.add_summary(Summary(value=values), row.step, row.time)
        self._writer.flush()


def _written(folder: str, until: int) -> dict[str, int]:
    """The newest step, at most ``until``, of each name in the event files of earlier processes."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat import tf

    steps: dict[str, int] = {}
    for file in sorted(tf.io.gfile.glob(f"{folder}/events.out.tfevents.*")):
        if file.split(".")[-2] == str(os.getpid()):
            continue
        for event in EventFileLoader(file).Load():
            if event.HasField("session_log"):  # another attempt begins, and purges
                steps = {name: step for name, step in steps.items() if step < event.step}
            elif event.HasField("summary") and event.step <= until:
                steps |= {value.tag: event.step for value in event.summary.value}
    return steps
