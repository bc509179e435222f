"""Format of the pods' logs: the prefixes of lines, and the lines that are for programs."""

from __future__ import annotations

import re
from typing import Final

from flk_runtime.contract.record import JobRecord

LAUNCHER_PREFIX: Final = "[pod {index}] "
RANK_PREFIX: Final = "[rank {rank}] "
RECORD_MARKER: Final = "flk-record "  # between the launcher's prefix and a JobRecord as JSON, for `flk status`
ATTEMPT_MARKER: Final = "flk-attempt "  # between the launcher's prefix and the number of the attempt, from 1
TELEMETRY_MARKER: Final = "flk-telemetry "  # between the launcher's prefix and the packed telemetry, at the end
BENCH_MARKER: Final = "flk-bench "  # between the prefix of rank 0 and the result of `flk bench` as JSON
RECORD_INTERVAL: Final = 1000  # lines after which the launcher of pod 0 repeats the record, so that a tail contains it
_RECORD_LINE = re.compile(r"^\[pod \d+\] " + re.escape(RECORD_MARKER))
_TELEMETRY_LINE = re.compile(r"^\[pod \d+\] " + re.escape(TELEMETRY_MARKER))
_ATTEMPT_LINE = re.compile(r"^\[pod \d+\] " + re.escape(ATTEMPT_MARKER) + r"(\d{1,9})$")


def parse_record(line: str) -> JobRecord | None:
    """The job record that a line of a pod's log contains, or None."""
    match = _RECORD_LINE.match(line)
    return JobRecord.from_json(line[match.end() :]) if match else None


def parse_attempt(line: str) -> int | None:
    """The number, from 1, of the attempt that begins with a line of a pod's log; None for other lines."""
    match = _ATTEMPT_LINE.match(line)
    return int(match[1]) if match else None


def parse_telemetry(line: str) -> str:
    """The telemetry, as `telemetry_archive.pack` writes it, that a line of a pod's log contains; empty for others."""
    match = _TELEMETRY_LINE.match(line)
    return line[match.end() :] if match else ""


def is_record(line: str) -> bool:
    """Return whether a line of a pod's log is for programs: a job record, telemetry or the mark of an attempt."""
    return any(pattern.match(line) for pattern in (_RECORD_LINE, _ATTEMPT_LINE, _TELEMETRY_LINE))
