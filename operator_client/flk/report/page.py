"""Make the HTML page of a report. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

import jinja2

from flk.jobs.state import Phase
from flk.report.charts import Chart, charts_of
from flk.report.facts import facts_of
from flk.report.model import Report
from flk.units import short_duration
from flk_runtime.contract.quantities import size_text
from flk_runtime.contract.record import TIME_CAUSES

MARK: Final = "<!-- made by flk report -->"  # after the type of the document: flk replaces only files that have it
_HERE: Final = Path(__file__).parent
_TONES: Final = {Phase.SUCCEEDED: "good", Phase.RUNNING: "good", Phase.FAILED: "bad", Phase.STUCK: "bad"}


def page_of(report: Report, script: str | None) -> str:
    """Return the page of a report. Without a ``script`` that draws charts, the page has their numbers only."""
    # In this order in the page. Their hashes allow these scripts and no others.
    scripts = [script, _own("page.js")] if script else []
    charts: list[Chart] = charts_of(report) if script else []
    return _template().render(
        report=report,
        charts={chart.key: chart for chart in charts},
        specs={chart.key: chart.spec for chart in charts},
        facts=facts_of(report),
        causes=TIME_CAUSES,
        mark=MARK,
        style=_own("page.css"),
        scripts=scripts,
        policy=_policy(scripts),
    )


def _policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: nothing is loaded, and no other script runs, whatever the page contains."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    source = f"script-src {hashes}; " if hashes else ""
    return f"default-src 'none'; {source}style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@functools.cache
def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
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
    return environment.get_template("page.html")


def _time(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC" if seconds else ""
