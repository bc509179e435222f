"""Weights & Biases: one run of a project, online or in files."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from flk_sinks.sink import Row, RunInfo, Written

_FLUSH: Final = "x_transaction_log_flush_interval"  # a setting of newer releases: seconds between two writes
STEP: Final = "step"  # the axis of all curves; W&B's own step counts rows
# Files of a run: after 7 bytes, records in blocks as in LevelDB's log.
_BEGIN, _BLOCK, _HEADER = 7, 32768, 7
_FIRST_OR_WHOLE: Final = (1, 2)


class WandB:
    """Logs to Weights & Biases. A step that is done again keeps the values that it has there."""

    title = "Weights & Biases"
    settles = 20.0  # its own process writes and sends what it gets every 15 s

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._wandb: Any = None
        self._written: Written | None = None

    def open(self) -> None:
        import wandb

        run_id = os.environ.get("WANDB_RUN_ID") or self._run.id
        # No output, arguments, code or environment of the process: they may hold secrets.
        private = wandb.Settings(
            console="off", save_code=False, disable_code=True, disable_git=True, disable_job_creation=True,
            silent=True, x_disable_meta=True,
        )  # fmt: skip
        if hasattr(private, _FLUSH):
            setattr(private, _FLUSH, 1.0)
        name = None if os.environ.get("WANDB_NAME") else self._run.name
        group = self._run.group if self._run.group != self._run.id else None
        # create_new: what the script itself begins later is another run.
        self._wandb = wandb.init(
            id=run_id, name=name, group=group, resume="allow", reinit="create_new", settings=private
        )
        self._wandb.define_metric(STEP, hidden=True)
        self._wandb.define_metric("*", step_metric=STEP)
        if self._written is None:
            self._written = Written(self._earlier(run_id))

    def describe(self) -> None:
        self._wandb.config.update(self._run.described, allow_val_change=True)

    def write(self, rows: Sequence[Row]) -> None:
        written = self._written or Written({})
        for row in written.missing(rows):
            self._wandb.log({STEP: row.step, **row.values})
            written.add([row])

    def close(self, ended: str) -> None:
        if ended == "stopped":
            self._wandb.mark_preempting()
        self._wandb.finish(exit_code=int(ended != "finished"))

    def _earlier(self, run_id: str) -> dict[str, int]:
        """The newest step of each name, as earlier attempts have written it."""
        if not self._wandb.offline:
            summary = dict(self._wandb.summary)
            newest = summary.get(STEP)
            return dict.fromkeys(summary, int(newest)) if newest is not None else {}
        found: dict[str, int] = {}
        folder = glob.escape(os.path.dirname(os.path.dirname(self._wandb.dir)))  # that has a folder for each attempt
        for file in glob.glob(f"{folder}/offline-run-*-{run_id}/run-{run_id}.wandb"):
            for row in rows_of(file):
                found |= {name: max(found.get(name, -1), int(row[STEP])) for name in row.keys() - {STEP} if STEP in row}
        return found


def rows_of(file: str) -> Iterator[dict[str, Any]]:
    """Yield the rows in a file of a run."""
    for record in records_of(file):
        if record.HasField("history"):
            yield values_of(record.history.item)


def records_of(file: str) -> Iterator[Any]:
    """Yield the records in a file of a run. The one that a killed process has left half written is the end."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _contents(file):
        record = Record()
        record.ParseFromString(content)
        yield record


def values_of(items: Iterable[Any]) -> dict[str, Any]:
    """Return the values of the items of a record, by their names."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _contents(file: str) -> Iterator[bytes]:
    with open(file, "rb") as stream:
        data = stream.read()
    at, record = _BEGIN, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # too little for a header: zeros
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        chunk = data[at + _HEADER : at + _HEADER + length]
        if not kind or len(chunk) < length:
            return
        record = chunk if kind in _FIRST_OR_WHOLE else record + chunk
        at += _HEADER + length
        if kind in (1, 4):
            yield record
