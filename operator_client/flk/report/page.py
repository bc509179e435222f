"""Make the HTML page of a report, which begins with a few numbers. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Final

import jinja2

from flk.jobs.state import Phase
from flk.report.charts import Chart, charts_of
from flk.report.model import Report
from flk.spec.units import number_text, short_duration
from flk.user.files import cache_folder, write_whole
from flk_runtime.contract.quantities import plural, size_text
from flk_runtime.contract.record import TIME_CAUSES
from flk_runtime.contract.telemetry import Telemetry, latest_sample

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


def facts_of(report: Report) -> dict[str, str]:
    """Return the numbers by their names. What is not known is empty."""
    state, telemetry = report.state, report.telemetry
    history = telemetry.history if telemetry else []
    last = latest_sample(history)
    # The goodput of a job that has failed counts the steps only whose result is in storage.
    told = [last.step if last else None, state.goodput.step if state.goodput else None]
    steps = max((each for each in told if each is not None), default=None)
    total = telemetry.total_steps if telemetry else None
    rates = [(each.tokens_per_s, "tokens/s") for each in history if each.tokens_per_s]
    rates = rates or [(each.samples_per_s, "samples/s") for each in history if each.samples_per_s]
    seconds = [each.step_seconds for each in history if each.step_seconds is not None]
    size = state.size or state.replicas - state.spares
    restarts = "" if state.max_restarts is None else f"{state.restarts} of {state.max_restarts}"
    disruptions = "" if state.max_disruptions is None else f"{state.disruptions} of {state.max_disruptions}"
    goodput = state.goodput.share if state.goodput else None
    return {
        "Size": f"{plural(size, 'pod')} × {plural(state.processes, 'rank')}",
        "Run time": "" if report.duration is None else short_duration(report.duration),
        "Steps": "" if steps is None else f"{steps:,}" + (f" of {total:,}" if total else ""),
        "Last loss": _last_loss(telemetry),
        "Throughput": f"{number_text(median([rate or 0.0 for rate, _ in rates]))} {rates[0][1]}" if rates else "",
        "Step": f"{median(seconds):.3g} s" if seconds else "",
        "Goodput": "" if goodput is None else f"{goodput:.0%}",
        "Attempts": str(len(state.attempts) or ""),
        "Restarts": restarts,
        "Disruptions": disruptions,
        "Newest checkpoint": "" if state.saved_step is None else f"step {state.saved_step:,}",
    }


def _last_loss(telemetry: Telemetry | None) -> str:
    if telemetry and telemetry.diverged is not None:
        return f"infinite or no number since step {telemetry.diverged:,}"
    losses = [each.loss for each in telemetry.history if each.loss is not None] if telemetry else []
    return f"{losses[-1]:.4g}" if losses else ""


MISSING: Final = "the charts are left out, their numbers are in tables: pip install vl-convert-python brings the charts"


def drawing_script() -> str | None:
    """Return the script, which needs no network; None where vl-convert is not installed.

    Making it takes seconds, so it is kept in the user's cache folder for each version.
    """
    try:
        import vl_convert
    except ImportError:
        return None
    kept = cache_folder() / f"vega-{metadata.version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    made = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    with contextlib.suppress(OSError):
        write_whole(kept, made.encode())
    return made
