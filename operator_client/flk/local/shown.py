"""What a run on this machine says: how a terminal shows its lines, and the line with which it ends."""

from __future__ import annotations

import json
import re
import time
from typing import Final

from flk.errors import JobFailedError
from flk.spec.units import short_duration
from flk_runtime.contract import log_format
from flk_runtime.contract.record import JobRecord
from flk_runtime.contract.telemetry import unpack_telemetry

_METRICS: Final = re.compile(r"(\[ranks? [\d,-]+\] )?(\{.*\})")
_SAID_AT_THE_END: Final = re.compile(r"\[pod \d+\] (?:failed: |attempt \d+ ended: )")
_SHARES: Final = {"mfu": "MFU", "comm": "communication", "data_wait": "waiting for data"}
_RATES: Final = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
_LEAST: Final = 0.1  # share of the time in which a rank waits that is worth a word


class MetricsText:
    """Lines of metrics of one job for people, where a terminal shows them."""

    def __init__(self) -> None:
        self.last: log_format.MetricsLine | None = None
        self.loss: float | None = None  # the last one that was told
        self.total: int | None = None  # steps of the whole job
        self._at = 0.0  # when the last metrics came

    def text(self, line: str) -> str | None:
        """Return a line of a log, which may begin with its rank, for people; None if it has no metrics."""
        match = _METRICS.fullmatch(line)
        metrics = log_format.parse_metrics(match[2]) if match else None
        return f"{match[1] or ''}{self._of(metrics, match[2])}" if match and metrics else None

    def _of(self, metrics: log_format.MetricsLine, written: str) -> str:
        """Return how far the job is, its loss and its speed, and how long it still takes."""
        now, before = time.monotonic(), self.last
        self.total = metrics.total or self.total
        parts = [f"step {metrics.step}" + (f" of {self.total} ({metrics.step / self.total:.0%})" if self.total else "")]
        values = json.loads(written)
        for name in ("step", *log_format.TOTAL_NAMES):
            values.pop(name, None)
        for name, value in values.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            if name in _SHARES and isinstance(value, float):
                parts += [f"{value:.0%} {_SHARES[name]}"] if name == "mfu" or value >= _LEAST else []
            else:
                parts.append(f"{shown} {_RATES[name]}" if name in _RATES else f"{name} {shown}")
        if self.total and before and metrics.step > before.step:
            left = (self.total - metrics.step) * (now - self._at) / (metrics.step - before.step)
            parts += [f"{short_duration(left)} left"] if left >= 1 else []
        self.last, self._at = metrics, now
        self.loss = self.loss if metrics.loss is None else metrics.loss
        return "  ".join(parts)


class Shown:
    """The lines of all pods of a run, as they come. ``record`` is the last record of the launcher of pod 0.

    ``keeps``: the checkpoints of the run outlive it.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.record: JobRecord | None = None
        self._keeps = keeps
        self._began = time.monotonic()
        self._metrics = MetricsText()

    def line(self, text: str, *, on_terminal: bool) -> str | None:
        """Return a line as it is shown; None for one that is for programs, or that the end says again."""
        if log_format.is_record(text):
            record = log_format.parse_record(text)
            if record and not (self.record and self.record.outcome == "failed"):
                self.record = record
            telemetry = unpack_telemetry(log_format.parse_telemetry(text))
            self._metrics.total = (telemetry and telemetry.total_steps) or self._metrics.total
            return None
        shown = self._metrics.text(text)
        if not on_terminal:
            return text
        return None if _SAID_AT_THE_END.match(text) else shown or text

    @property
    def took(self) -> str:
        """How long the run has taken, and how many attempts, if more than one."""
        attempts = len(self.record.attempts) if self.record else 0
        return f"after {short_duration(time.monotonic() - self._began)}" + (
            f" and {attempts} attempts" if attempts > 1 else ""
        )

    def failure(self, name: str) -> JobFailedError | None:
        """Return the error of a run of the job ``name`` that has failed; None of another one."""
        record = self.record
        if record is None or record.failure is None:
            return None
        reason = f"; {record.no_retry_reason}" if record.no_retry_reason else ""
        hint = f"the same command goes on at step {record.stored}" if record.stored and self._keeps else ""
        return JobFailedError(f"job {name} failed {self.took}: {record.failure.summary}{reason}", hint=hint)

    def end(self) -> str:
        """Return what is known at the end of a run that has not failed: time, steps, loss and checkpoint."""
        record, last, total = self.record, self._metrics.last, self._metrics.total
        ended = record.attempts[-1] if record and record.attempts else None
        restored = (ended and ended.restored) or 0
        # An attempt that has succeeded tells no step of its own.
        told = [last and last.step, record and record.saved, record and record.goodput and record.goodput.step]
        step, of = max([restored, *(number for number in told if number)]), f" of {total}" if total else ""
        if restored and step == restored and any(told):
            return f"nothing to do: the training is at step {step}{of}"
        parts = [f"step {step}{of}"] if step else []
        if self._metrics.loss is not None:
            parts.append(f"loss {self._metrics.loss:.4g}")
        if self._keeps and record and record.saved is not None:
            where = "" if record.stored == record.saved else " in memory"
            parts.append(f"checkpoint of step {record.saved}{where}")
        return f"{self.took}: {', '.join(parts)}" if parts else self.took
