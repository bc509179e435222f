"""Make the HTML page of one report, or of several side by side. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import jinja2

from flk.jobs.state import Phase
from flk.report.build import LINES, MOMENTS, PODS
from flk.report.charts import Chart, charts_of
from flk.report.facts import differing_options, facts_of
from flk.report.model import Report
from flk.units import short_duration
from flk_runtime.contract.ranges import size_text
from flk_runtime.contract.record import TIME_CAUSES
from flk_runtime.contract.telemetry import HISTORY_LIMIT, PODS_LIMIT, RANKS_LIMIT
from flk_runtime.contract.telemetry_archive import thinned

MARK: Final = "<!-- made by flk report -->"  # after the type of the document: flk replaces only files that have it
_HERE: Final = Path(__file__).parent
_TONES: Final = {Phase.SUCCEEDED: "good", Phase.RUNNING: "good", Phase.FAILED: "bad", Phase.STUCK: "bad"}


def page_of(reports: Sequence[Report], script: str | None, *, refresh: int = 0) -> str:
    """Return the page of one report, or of several, which differ in their names.

    Without a ``script`` that draws charts, the page has their numbers only. With ``refresh`` the page is served and
    replaces its content each so many seconds.
    """
    own = _own("page.js")
    # In this order in the page. Their hashes allow these scripts and no others.
    scripts = [script, own] if script else [own] if refresh else []
    return _template().render(
        **_content(reports, script is not None),
        mark=MARK,
        style=_own("page.css"),
        scripts=scripts,
        policy=_policy(scripts, served=bool(refresh)),
        refresh=refresh,
    )


def content_of(reports: Sequence[Report], *, charts: bool) -> str:
    """Return the part of a served page that changes: the content of its body."""
    return _template("content.html").render(**_content(reports, charts))


def _content(reports: Sequence[Report], with_charts: bool) -> dict[str, Any]:
    several = len(reports) > 1
    reports = [_shortened(report) for report in reports] if several else reports
    charts: list[Chart] = charts_of(reports) if with_charts else []
    facts = [facts_of(report) for report in reports]
    return {
        "reports": reports,
        "several": several,
        "title": " and ".join(report.name for report in reports),
        "charts": {chart.key: chart for chart in charts},
        "specs": {chart.key: chart.spec for chart in charts},
        "compared": [(name, [fact[name] for fact in facts]) for name in facts[0]],
        "differing": differing_options(reports) if several else [],
        "causes": TIME_CAUSES,
        "made": max(report.made for report in reports),
    }


def _shortened(report: Report) -> Report:
    """Return a report whose lists are half as long as they may be, so that two are no larger than one."""
    telemetry = report.telemetry and replace(
        report.telemetry,
        history=thinned(report.telemetry.history, HISTORY_LIMIT // 2),
        ranks=report.telemetry.ranks[: RANKS_LIMIT // 2],
        pods=report.telemetry.pods[: PODS_LIMIT // 2],
    )
    excerpts = [replace(each, lines=each.lines[-LINES // 2 :]) for each in report.excerpts]
    moments, pods = report.moments[-MOMENTS // 2 :], report.pods[: PODS // 2]
    return replace(report, telemetry=telemetry, excerpts=excerpts, moments=moments, pods=pods)


def _policy(scripts: Sequence[str], *, served: bool) -> str:
    """Return the Content-Security-Policy: nothing is loaded, and no other script runs, whatever the page contains."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    source = f"script-src {hashes}; " if hashes else ""
    connect = "connect-src 'self'; " if served else ""
    return f"default-src 'none'; {source}{connect}style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@functools.cache
def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@functools.cache
def _template(name: str = "page.html") -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}  # of the charts' data
    environment.filters |= {
        "time": _time,
        "clock": lambda seconds: _time(seconds).removesuffix(" UTC"),
        "duration": lambda seconds: "" if seconds is None else short_duration(seconds),
        "share": lambda value: "" if value is None else f"{value:.0%}",
        "number": lambda value: "" if value is None else f"{value:.4g}",
        "bytes": lambda size: "" if size is None else size_text(size),
        "tone": lambda phase: _TONES.get(phase, "calm"),
    }
    return environment.get_template(name)


def _time(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC" if seconds else ""
