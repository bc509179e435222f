"""The launcher's own lines on stderr, the job record among them, and the pod's termination message."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flk_runtime.contract import log_format, pod_layout, user_env
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.record import Attempt, Goodput, JobRecord, SlowRank, Standstill
from flk_runtime.contract.status import RankStatus
from flk_runtime.contract.telemetry import PodUsage, pack_telemetry, unpack_telemetry
from flk_runtime.launcher.control import exit_code_of_signal
from flk_runtime.launcher.records.history import former_attempts, job_record, new_record
from flk_runtime.launcher.records.ledger import Ledger
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry.keeper import Keeper
from flk_runtime.shared.progress import ProgressPage

if TYPE_CHECKING:
    from flk_runtime.launcher.records.archive import RecordArchive
    from flk_runtime.launcher.telemetry.metrics_page import MetricsPage

_LAST = 8.0  # seconds for the last write to the cluster, at the end of the job
_RENEWED = 300.0  # seconds after which the log gets the goodput anew
_LAST_STOPPED = 2.5  # and after SIGTERM, within the grace period of the pod


class RecordWriter:
    """Writes the reports of one launcher: lines for people, and records of the job for programs."""

    def __init__(
        self, settings: Settings, write: Callable[[bytes], None], last_lines: Callable[[int], list[str]]
    ) -> None:
        """``write`` writes to the launcher's stderr and returns at once; ``last_lines`` returns the latest lines."""
        self._settings = settings
        self._write = write
        self._kept = self._open_archive(last_lines) if settings.pod == 0 else None
        self.ledger = Ledger(time.monotonic(), time.time()) if settings.trains and settings.pod == 0 else None
        """Goodput; None: another pod keeps it, or the job does not train."""
        self.telemetry = _new_keeper(settings) if settings.telemetry and settings.pod == 0 else None
        """The measurements of the job; None: another pod has them, or nobody asks."""
        self._metrics: MetricsPage | None = None
        if settings.metrics_port:
            from flk_runtime.launcher.telemetry.metrics_page import MetricsPage  # not every job needs it

            self._metrics = MetricsPage(settings, self.log, self.telemetry.read if self.telemetry else None)
        self._renew_at = 0.0  # when the log gets the goodput anew, by time.monotonic
        self._started = time.time()
        self._latest: JobRecord | None = None
        self.saved: dict[str, Any] = {}
        """Steps of the newest checkpoints, by the fields of the record that have them."""
        self._lines = 0  # of the ranks, since the latest record was written

    def log(self, text: str) -> None:
        """Write a line of the launcher itself to stderr."""
        prefix = log_format.LAUNCHER_PREFIX.format(index=self._settings.pod_in_job)
        self._write(f"{prefix}{text}\n".encode(errors="replace"))

    def write(self, record: JobRecord) -> None:
        """Write the job record as a line of the log."""
        record = self._log_record(record)
        if self._kept:
            self._kept.put_record(record)
        if self._metrics:
            self._metrics.put_record(record)

    def _log_record(self, record: JobRecord) -> JobRecord:
        """Write the record as a line of the log, and return it with the goodput."""
        self._latest = record = self._dated(record)
        self.log(log_format.RECORD_MARKER + record.to_json())
        self._renew_at = time.monotonic() + _RENEWED
        return record

    def former(self) -> tuple[list[Attempt], bool]:
        """Read from the cluster the attempts of this job that no launcher knows any more, since all were killed.

        Returns also whether the job has had attempts: those before it was suspended are not among the former ones.
        """
        entry = self._kept.read() if self._kept else None
        if entry and entry.record.goodput and self.ledger:
            self.ledger.resume(entry.record.goodput)
        former = unpack_telemetry(entry.telemetry) if entry and self.telemetry else None
        if former and self.telemetry:
            self.telemetry.resume(former)
        again = bool(self._settings.restarted)
        if not entry:
            return [], again
        found = former_attempts(entry, self._settings.pod_name, self._settings.started)
        return found, again or bool(entry.record.attempts)

    def keep_progress(self, ranks: Sequence[RankStatus], usage: PodUsage | None = None) -> None:
        """Show the progress of this pod's ranks in the metrics, and keep the first one's in the cluster.

        The goodput goes with it, and to the log when it is much older there. ``usage`` is what this pod uses.
        """
        first = next(iter(ranks), None)
        if first:
            self.keep_steps(first)
        goodput = self._goodput(self._latest)
        if self._latest and goodput and time.monotonic() >= self._renew_at:
            self._log_record(self._latest)
        if self._metrics:
            self._metrics.put_progress(ranks, goodput, usage)
        if self._kept and first and self._latest:
            self._kept.put_progress(first, self._dated(self._latest))

    def keep_steps(self, rank: RankStatus | ProgressPage) -> None:
        """Remember which checkpoints a rank has saved, or else has restored, for the records from now on."""
        for name, step in ("saved", max(rank.saved, rank.restored)), ("stored", rank.stored):
            if step > 0:
                self.saved[name] = step

    def write_running(self, history: Sequence[Attempt]) -> None:
        """Write the record of a job whose last attempt is running."""
        self.write(new_record("running", 0, None, history, self._settings.limits))

    def write_waits(self, slow: Sequence[SlowRank], standstill: Standstill | None) -> None:
        """Write the record of the running job anew, with the ranks that the others wait for now."""
        if self._latest and self._latest.outcome == "running":
            self.write(replace(self._latest, slow=list(slow), standstill=standstill))

    def count_lines(self, lines: int) -> None:
        """Count lines of the ranks, and repeat the record so that a tail of the log contains it."""
        self._lines += lines
        if self._lines >= log_format.RECORD_INTERVAL and self._latest:
            self._lines = 0
            self.write(self._latest)

    def finish(self, record: JobRecord, *, leader: bool) -> int:
        """Write the record of a job that has ended; the ``leader`` logs it too. Returns the launcher's exit code."""
        record = self._dated(record)
        write_termination_message(self._settings.termination_log, record)
        if record.outcome == "replaced" and record.failure:
            self.log(f"leaving, so that another pod replaces this one: {record.failure.summary}")
        elif leader:
            self.write(record)
            self._log_telemetry()
            if record.warning:
                self.log(f"warning: {record.warning}")
            if record.failure:
                reason = f"; {record.no_retry_reason}" if record.no_retry_reason else ""
                self.log(f"failed: {record.failure.summary}{reason}")
            if self._kept:
                self._kept.flush(_LAST)
        return record.code

    def finish_stopped(self, number: int, failure: Failure | None, history: Sequence[Attempt]) -> int:
        """Write that a signal has stopped this launcher. Returns its exit code.

        ``failure`` says why the attempt ended in all pods, if that is known.
        """
        code = exit_code_of_signal(number)
        self.log(f"received {signal.Signals(number).name}; all ranks of this pod have ended")
        record = self._dated(new_record("preempted", code, failure, history, self._settings.limits))
        write_termination_message(self._settings.termination_log, record)
        self._log_telemetry()
        if self._kept:  # else the next launcher would take this one for killed
            self._kept.put_record(record)
            self._kept.flush(_LAST_STOPPED)
        return code

    def finish_without_ranks(self, failure: Failure, history: Sequence[Attempt]) -> int:
        """Write that this pod has lost its ranks. Returns the launcher's exit code.

        The code makes the operator start this pod again, for the next attempt, as if the launcher had been killed too,
        unless the job allows no disruption.
        """
        record = job_record(failure, history, self._settings.limits)
        write_termination_message(self._settings.termination_log, record)
        self.log(f"failed: {failure.summary}")
        return 128 + signal.SIGKILL if self._settings.limits.disruptions else failure.code

    def _open_archive(self, last_lines: Callable[[int], list[str]]) -> RecordArchive | None:
        settings = self._settings
        if not (settings.records or settings.record_folder):
            return None
        from flk_runtime.launcher.records.archive import ConfigMap, Folder, RecordArchive  # not every job needs it

        place = ConfigMap(settings.records) if settings.records else Folder(settings.record_folder)
        return RecordArchive(settings, place, last_lines, self.log, telemetry=self._packed_telemetry)

    def _packed_telemetry(self) -> str:
        return pack_telemetry(self.telemetry.read()) if self.telemetry else ""

    def _log_telemetry(self) -> None:
        """Write what was measured as a line of the log, which `flk report` reads when no launcher can be asked."""
        if packed := self._packed_telemetry():
            self.log(log_format.TELEMETRY_MARKER + packed)

    def _goodput(self, record: JobRecord | None) -> Goodput | None:
        found = self.ledger.read(time.monotonic()) if self.ledger else None
        standstill = record.standstill if record else None
        return found.hanging_since(standstill.since) if found and standstill else found

    def _dated(self, record: JobRecord) -> JobRecord:
        """The record with the time at which the job's first launcher started, and what the time went into."""
        goodput = self._goodput(record)
        started = self._kept.created if self._kept else self._started
        return replace(record, started=started, goodput=goodput, **self.saved)


def _new_keeper(settings: Settings) -> Keeper:
    facts = {
        "strategy": user_env.STRATEGY.read(os.environ),
        "world size": str(settings.world_size),
        "code": settings.code_hash,
    }
    return Keeper({name: value for name, value in facts.items() if value})


def write_termination_message(path: str, record: JobRecord) -> None:
    """Write the record to the pod's termination message, which outlives its log. Nothing happens without a path."""
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(record.to_json(pod_layout.TERMINATION_LOG_LIMIT))
