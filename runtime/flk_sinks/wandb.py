"""Weights & Biases: one run of a project, online or in files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from flk_sinks.sink import Row, RunInfo, Written

_FLUSH: Final = "x_transaction_log_flush_interval"  # a setting of newer releases: seconds between two writes
STEP: Final = "step"  # the axis of all curves; W&B's own step counts rows


class WandB:
    """Logs to Weights & Biases. A step that is done again keeps the values that it has there, if the run is online."""

    title = "Weights & Biases"

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
            self._written = Written(self._earlier())

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

    def _earlier(self) -> dict[str, int]:
        """The newest step of each name, as earlier attempts have sent it."""
        summary = {} if self._wandb.offline else dict(self._wandb.summary)
        newest = summary.get(STEP)
        return {} if newest is None else dict.fromkeys(summary, int(newest))
