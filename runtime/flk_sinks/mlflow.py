"""MLflow: one run of a tracking server, a database or a folder."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from flk_sinks.sink import Row, RunInfo, Written

T = TypeVar("T")
TAG: Final = "flk.run"  # by which the next attempt finds the run
_METRICS, _PARAMETERS = 1000, 100  # what one request may have
_LENGTH, _NAME_LENGTH = 6000, 250  # characters of a parameter, and of a name
_STATUS: Final = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. :/]")


class MLflow:
    """Logs to the server of MLFLOW_TRACKING_URI. A step that is done again keeps the values that it has there."""

    title = "MLflow"

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._client: Any = None
        self._id = ""
        self._written = Written({})
        self._parameters: set[str] = set()  # which cannot be changed
        self._names: dict[str, str] = {}  # those that were given, by the names that MLflow has for them

    def open(self) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self._id = os.environ.get("MLFLOW_RUN_ID") or self._found() or self._created()
        self._client.update_run(self._id, status="RUNNING")
        run = self._client.get_run(self._id)
        self._written = Written({each.key: each.step for each in run.to_proto().data.metrics})
        self._parameters = set(run.data.params)

    def describe(self) -> None:
        from mlflow.entities import Param, RunTag

        tags = [RunTag(f"flk.{name}", str(value)) for name, value in self._run.settings.items()]
        self._client.log_batch(self._id, tags=[RunTag(TAG, self._run.id), *tags])
        given = {self._name(name): str(value)[:_LENGTH] for name, value in self._run.hyperparameters.items()}
        new = [Param(name, value) for name, value in given.items() if name not in self._parameters]
        for some in _parts(new, _PARAMETERS):
            self._client.log_batch(self._id, params=some)
        self._parameters |= given.keys()

    def write(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        named = [row._replace(values={self._name(name): value for name, value in row.values.items()}) for row in rows]
        new = self._written.missing(named)
        metrics = [
            Metric(name, each, int(row.time * 1000), row.step) for row in new for name, each in row.values.items()
        ]
        for some in _parts(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=some)
        self._written.add(new)

    def close(self, ended: str) -> None:
        self._client.set_terminated(self._id, status=_STATUS[ended])

    def _name(self, text: str) -> str:
        """A name that MLflow takes, with a checksum if another text has it already."""
        name = _accepted(text)
        if self._names.setdefault(name, text) == text:
            return name
        return f"{name[: _NAME_LENGTH - 9]}-{zlib.crc32(text.encode()):08x}"

    def _found(self) -> str:
        """The run of an earlier attempt; empty if there is none."""
        runs = self._client.search_runs([self._experiment()], f"tags.`{TAG}` = '{self._run.id}'", max_results=1)
        return str(runs[0].info.run_id) if runs else ""

    def _created(self) -> str:
        created = self._client.create_run(self._experiment(), run_name=self._run.name, tags={TAG: self._run.id})
        return str(created.info.run_id)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


def _accepted(text: str) -> str:
    """A name that MLflow takes. It refuses a whole request for a name that is no path in its shortest form."""
    parts = [part for part in _NOT_IN_NAMES.sub("_", text).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_NAME_LENGTH].rstrip("/") or "_"


def _parts(items: Sequence[T], length: int) -> Iterator[list[T]]:
    for begin in range(0, len(items), length):
        yield list(items[begin : begin + length])
