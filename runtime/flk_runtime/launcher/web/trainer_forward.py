"""TrainerForward: sends the progress of a job to Kubeflow Trainer's status server, which shows it in the TrainJob.

Trainer names its server in the variables of a TrainJob's pods where its feature gate TrainJobStatus is on. The protocol
is that of `proposals/2779-trainjob-progress` in kubeflow/trainer.
"""

from __future__ import annotations

import datetime
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

from flk_runtime.contract import metrics_line, pod_env
from flk_runtime.launcher.web import http as cluster_http

_EVERY: Final = 5.0  # seconds between two messages, as Trainer's own client
_METRICS: Final = 256  # that the protocol allows
_MOST: Final = (1 << 31) - 1  # seconds that remain, in a field of 32 bits
_LARGEST: Final = 1 << 63  # a larger number may have no float
_LENGTH: Final = 64  # characters of a metric's name, and of its value
_OWN: Final = {"progress", "eta_s", metrics_line.AT}  # keys of a line that are no metrics


class TrainerForward:
    """A thread that sends the newest line of metrics, at most once in five seconds, until `close`."""

    def __init__(self, variables: Mapping[str, str], log: Callable[[str], None]) -> None:
        """``variables`` are those that Trainer sets. ``log`` gets one line if the server refuses."""
        self._url = variables[pod_env.TRAINER_URL]
        token = variables.get(pod_env.TRAINER_TOKEN)
        self._token = Path(token) if token else None
        self._authority = variables.get(pod_env.TRAINER_CA) or None
        self._log = log
        self._changed = threading.Condition()
        self._line = b""  # the newest that is not sent
        self._first: tuple[int, float] | None = None  # the first step of this launcher, and its time
        self._told = self._closed = False
        self._thread = threading.Thread(target=self._run, name="flk-trainer-forward", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Take a line of rank 0 that may be metrics."""
        if (found := metrics_line.parse(line)) is None:
            return
        with self._changed:
            self._first = self._first or (found.step, time.monotonic())
            self._line = line
            self._changed.notify()

    def close(self) -> None:
        """Send what is left, within five seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(cluster_http.TIMEOUT)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line or self._closed)
                line, self._line = self._line, b""
                body = status_of(line, *self._first, time.monotonic()) if line and self._first else None
            if body:
                self._send(body)
            with self._changed:
                if self._closed and not self._line:
                    return
                self._changed.wait_for(lambda: self._closed, _EVERY)

    def _send(self, body: bytes) -> None:
        try:
            cluster_http.send(
                self._url,
                body,
                method="POST",
                content_type="application/json",
                token=self._token,
                authority=self._authority,
            )
        except cluster_http.ERRORS as error:
            if not self._told:
                self._told = True
                self._log(f"the progress is not in the TrainJob: {self._url} does not take it: {error}")


def status_of(line: bytes, first: int, since: float, now: float) -> bytes:
    """The message for a line of metrics. ``first`` is the first step that was seen, at the time ``since`` in seconds.

    Percent and remaining time come from the line, else from its step and the number of steps.
    """
    values: dict[str, Any] = json.loads(line)
    found = metrics_line.parse(line)
    percent, remaining = values.get("progress"), values.get("eta_s")
    if found and found.total:
        percent = 100 * found.step / found.total if percent is None else percent
        if remaining is None and found.step > first and now > since:
            remaining = (found.total - found.step) * (now - since) / (found.step - first)
    metrics = [
        {"name": name[:_LENGTH], "value": repr(value)[:_LENGTH]}
        for name, value in values.items()
        if name and name not in _OWN and _is_number(value)
    ]
    status: dict[str, Any] = {"lastUpdatedTime": datetime.datetime.now(datetime.timezone.utc).isoformat()}
    if _is_number(percent):
        status["progressPercentage"] = min(100, max(0, int(percent)))
    if _is_number(remaining):
        status["estimatedRemainingSeconds"] = min(_MOST, max(0, int(remaining)))
    return json.dumps({"trainerStatus": status | {"metrics": metrics[:_METRICS]}}).encode()


def _is_number(value: Any) -> TypeGuard[int | float]:
    return (type(value) is int and abs(value) < _LARGEST) or (type(value) is float and math.isfinite(value))
