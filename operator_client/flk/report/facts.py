"""The few numbers that a report begins with."""

from __future__ import annotations

from statistics import median

from flk.report.model import Report
from flk.units import short_duration
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.telemetry import Telemetry, latest_sample


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
        "Throughput": f"{_rounded(median([rate or 0.0 for rate, _ in rates]))} {rates[0][1]}" if rates else "",
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


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
