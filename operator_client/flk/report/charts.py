"""Charts of a report, as specifications of Vega-Lite: plain data, which the script in the page draws.

Colours are variables of the page's style sheet, so that a chart follows the page from light to dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from flk.report.model import Report
from flk_runtime.contract.record import TIME_CAUSES
from flk_runtime.contract.telemetry import Sample
from flk_runtime.contract.values import dataclass

Spec = dict[str, Any]

HEIGHT: Final = 240
ROW: Final = 22  # height of a row of bars
_GIB: Final = 1 << 30
_SHORT, _LONG = 13, 20  # letters, of which three and two labels fit side by side on a phone
# How an attempt ended.
OUTCOMES: Final = ("succeeded", "running", "failed", "preempted", "resized", "deleted")


@dataclass(frozen=True)
class Chart:
    """One chart: where it is in the page, what it shows in words, and how it is drawn."""

    key: str
    title: str
    summary: str  # for people who do not see it
    spec: Spec


def charts_of(report: Report) -> list[Chart]:
    """Return the charts of a report. Those without data are left out."""
    return [chart for make in _CHARTS if (chart := make(report))]


def _throughput(report: Report) -> Chart | None:
    tokens = any(each.tokens_per_s is not None for each in _history(report))
    unit = "tokens/s" if tokens else "samples/s"
    return _line(
        report, "throughput", "Throughput", unit, lambda each: each.tokens_per_s if tokens else each.samples_per_s
    )


def _memory(report: Report) -> Chart | None:
    unit = "GiB in the pod that uses most"
    return _line(report, "memory", "Memory", unit, lambda each: None if each.memory is None else each.memory / _GIB)


def _goodput(report: Report) -> Chart | None:
    goodput = report.state.goodput
    if goodput is None:
        return None
    rows: list[dict[str, Any]] = [
        {"job": report.name, "cause": cause, "time": seconds, "order": order}
        for order, cause in enumerate(TIME_CAUSES)
        if (seconds := goodput.seconds.get(cause, 0.0)) > 0
    ]
    if not rows:
        return None
    told = {row["cause"] for row in rows}
    length, unit = _unit(goodput.total)
    for row in rows:
        row["time"] = round(row["time"] / length, 4)
    causes = [cause for cause in TIME_CAUSES if cause in told]
    spec = {
        "data": {"values": rows},
        "height": {"step": 2 * ROW},
        "mark": {"type": "bar", "stroke": "var(--page)", "strokeWidth": 1},
        "encoding": {
            "x": _axis("time", unit) | {"stack": "zero"},
            "y": {"field": "job", "type": "nominal", "title": None, "sort": None},
            "color": _colours("cause", causes, [f"var(--cause-{cause})" for cause in causes]),
            "order": {"field": "order"},
            "tooltip": [{"field": "job"}, {"field": "cause"}, {"field": "time", "type": "quantitative", "title": unit}],
        },
    }
    return Chart("goodput", "Time by cause", _told("time by cause", report), spec)


def _attempts(report: Report) -> Chart | None:
    rows = [
        {
            "attempt": f"attempt {each.number}",
            "from": each.started * 1000,
            "to": (each.ended or report.seen) * 1000,
            "outcome": each.outcome,
            "cause": each.cause,
        }
        for each in report.state.attempts[-50:]
    ]
    if not rows:
        return None
    told = {str(row["outcome"]) for row in rows}
    outcomes = [each for each in OUTCOMES if each in told]
    spec = {
        "data": {"values": rows},
        "height": {"step": ROW},
        "mark": {"type": "bar", "height": {"band": 0.6}, "minBandSize": 3, "cornerRadius": 2},
        "encoding": {
            "x": {
                "field": "from",
                "type": "temporal",
                "title": None,
                "scale": {"type": "utc"},
                "axis": {"format": _clock(rows)},
            },
            "x2": {"field": "to"},
            "y": {"field": "attempt", "type": "nominal", "title": None, "sort": None},
            "color": _colours("outcome", outcomes, [f"var(--outcome-{each})" for each in outcomes]),
            "tooltip": [{"field": name} for name in ("attempt", "outcome", "cause")],
        },
    }
    return Chart("attempts", "Attempts over time", _told("attempts over time", report), spec)


def _ranks(report: Report) -> Chart | None:
    """Seconds of a step by pod and rank in the pod, of the ranks that are listed."""
    rows = []
    processes = max(1, report.state.processes)
    for each in report.telemetry.ranks if report.telemetry else ():
        if each.step_seconds is not None:
            # What a rank works is what tells ranks apart: all of them wait for the slowest.
            work = each.step_seconds * (1 if each.work is None else each.work)
            place = {"pod": f"pod {each.pod}", "local": each.rank % processes}
            rows.append({**place, "rank": each.rank, "seconds": _short(work)})
    if len(rows) < 2:
        return None
    spec = {
        "data": {"values": rows},
        "height": {"step": 14 if len(rows) > 64 else ROW},
        "mark": "rect",
        "encoding": {
            "x": {"field": "local", "type": "ordinal", "title": "rank in the pod", "axis": {"labelAngle": 0}},
            "y": {"field": "pod", "type": "nominal", "title": None, "sort": None},
            "color": {
                "field": "seconds",
                "type": "quantitative",
                "title": "seconds of work in a step",
                "scale": {"scheme": "viridis"},
                "legend": {"orient": "top"},
            },
            "tooltip": [{"field": "rank"}, {"field": "pod"}, {"field": "seconds", "type": "quantitative"}],
        },
    }
    return Chart("ranks", "Work of each rank", _told("seconds of work in a step by rank", report), spec)


_CHARTS: Final = (
    _attempts,
    lambda report: _line(report, "loss", "Loss", "loss", lambda each: each.loss, zero=False),
    _throughput,
    lambda report: _line(report, "step-time", "Time of a step", "seconds per step", lambda each: each.step_seconds),
    _memory,
    _ranks,
    _goodput,
)


def _line(
    report: Report,
    key: str,
    title: str,
    unit: str,
    value_of: Callable[[Sample], float | None],
    *,
    zero: bool = True,
) -> Chart | None:
    rows = [
        {"step": each.step, "value": value, "attempt": each.attempt + 1, "place": each.time or each.step}
        for each in _history(report)
        if (value := value_of(each)) is not None
    ]
    if not rows:
        return None
    spec = _lines(rows, _axis("step", "step"), _axis("value", unit, zero=zero))
    return Chart(key, title, _told(f"{unit} over steps", report), spec)


def _lines(rows: list[dict[str, Any]], x: Spec, y: Spec) -> Spec:
    return {
        "data": {"values": [{**row, y["field"]: _short(row[y["field"]])} for row in rows]},
        "height": HEIGHT,
        "mark": {"type": "line", "strokeWidth": 1.75, "point": {"size": 40, "opacity": 0} if len(rows) > 60 else True},
        "encoding": {
            "x": x,
            "y": y,
            "color": {"value": "var(--line-1)"},
            "detail": {"field": "attempt"},
            "order": {"field": "place"},
            "tooltip": [
                {"field": "attempt"},
                {"field": x["field"], "type": "quantitative", "title": x["title"]},
                {"field": y["field"], "type": "quantitative", "title": y["title"], "format": ".4~g"},
            ],
        },
    }


def _short(value: float) -> float:
    """Return a number with the digits that a chart can show: others would be a tenth of the page."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _axis(name: str, title: str, *, zero: bool = True) -> Spec:
    return {"field": name, "type": "quantitative", "title": title, "scale": {"zero": zero, "nice": True}}


def _colours(name: str, domain: Sequence[str], colours: Sequence[str]) -> Spec:
    return {
        "field": name,
        "type": "nominal",
        "scale": {"domain": list(domain), "range": list(colours)},
        "legend": None if len(domain) == 1 else _legend(domain),
    }


def _legend(labels: Sequence[str]) -> Spec:
    """Return a legend above a chart, whose columns also fit on a phone."""
    longest = max(map(len, labels))
    columns = 3 if longest < _SHORT else 2 if longest < _LONG else 1
    return {"title": None, "orient": "top", "columns": columns, "labelLimit": 260 // columns}


def _clock(rows: Sequence[dict[str, Any]]) -> str:
    """Return the format of times that tells all of them apart."""
    hours = (max(row["to"] for row in rows) - min(row["from"] for row in rows)) / 3_600_000
    return "%H:%M:%S" if hours < 0.5 else "%H:%M" if hours < 20 else "%m-%d %H:%M"


def _unit(seconds: float) -> tuple[int, str]:
    """Return the length in seconds and the name of the unit in which a time is easy to read."""
    units = ((3600, "hours"), (60, "minutes"))
    return next(((length, name) for length, name in units if seconds >= 3 * length), (1, "seconds"))


def _history(report: Report) -> list[Sample]:
    return report.telemetry.history if report.telemetry else []


def _told(what: str, report: Report) -> str:
    return f"Chart: {what} of {report.name}. The table below has the same numbers."
