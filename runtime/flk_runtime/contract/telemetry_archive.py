"""Archived telemetry: the telemetry of a job, compressed and cut to a few kilobytes, for its archived record.

Floats keep four digits. The history is one list for each field of a sample, which compresses better.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, Final, TypeVar

from flk_runtime.contract import foreign
from flk_runtime.contract.status import SIGNS, RankStatus
from flk_runtime.contract.telemetry import Sample, Telemetry

T = TypeVar("T")
LIMIT: Final = 6000  # bytes of a packed telemetry
_INFLATED_LIMIT: Final = 1 << 20  # bytes that are read: the text may come from elsewhere
_SAMPLES, _LISTED = 240, 64  # that are tried first: samples, and ranks and pods
_COLUMNS: Final = [field.name for field in fields(Sample)]
_EXACT: Final = ("time", "attempt", "step", "slowest_rank")


def pack(telemetry: Telemetry, limit: int = LIMIT) -> str:
    """The telemetry as text of at most ``limit`` bytes. Samples are left out evenly, and ranks and pods from the end.

    Empty if not even one sample fits.
    """
    samples, listed = _SAMPLES, _LISTED
    while samples:
        text = _packed(telemetry, samples, listed)
        if len(text) <= limit:
            return text
        samples, listed = samples * 3 // 4, listed * 3 // 4
    return ""


def unpack(text: str) -> Telemetry | None:
    """The telemetry that `pack` has written; None if the text is none."""
    try:
        inflater = zlib.decompressobj()
        data = foreign.parse_object(inflater.decompress(base64.b64decode(text), _INFLATED_LIMIT))
        columns = data["history"]
        rows = zip(*columns.values(), strict=True)
        data["history"] = [dict(zip(columns, row, strict=True)) for row in rows]
        return foreign.read(Telemetry, data)
    except (*foreign.ERRORS, zlib.error):
        return None


def _packed(telemetry: Telemetry, samples: int, listed: int) -> str:
    history = thinned(telemetry.history, samples)
    columns = {
        name: [value if name in _EXACT else _rounded(value) for value in (getattr(each, name) for each in history)]
        for name in _COLUMNS
    }
    columns["time"] = [round(value) for value in columns["time"]]
    data = {
        "time": round(telemetry.time),
        "attempt": telemetry.attempt,
        "total_steps": telemetry.total_steps,
        "diverged": telemetry.diverged,
        "history": {name: values for name, values in columns.items() if any(each is not None for each in values)},
        "ranks": [_rounded(_lasting(each)) for each in telemetry.ranks[:listed]],
        "pods": [_rounded({**asdict(each), "time": round(each.time)}) for each in telemetry.pods[:listed]],
        "settings": telemetry.settings,
        "saves": [{**asdict(each), "time": round(each.time)} for each in thinned(telemetry.saves, listed // 2 or 1)],
        "saved": telemetry.saved,
    }
    return base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode()


def _lasting(rank: RankStatus) -> dict[str, Any]:
    return {name: value for name, value in asdict(rank).items() if name not in SIGNS}


def thinned(history: Sequence[T], limit: int) -> list[T]:
    """At most ``limit`` samples or saves, evenly chosen, with the first and the last one."""
    if len(history) <= limit:
        return list(history)
    if limit == 1:
        return [history[-1]]
    return [history[round(index * (len(history) - 1) / (limit - 1))] for index in range(limit)]


def _rounded(value: Any) -> Any:
    """The value with four digits of each float, and without the fields that are None."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items() if each is not None}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
