"""The text of `flk list`: a table of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flk.cli.table import table
from flk.terminal import printable_lines
from flk.units import short_duration

if TYPE_CHECKING:
    from flk.jobs.state import State


def list_text(states: list[State], now: float, *, wide: bool, all_namespaces: bool) -> str:
    """Return the table of jobs. ``wide`` shows the sentences of the causes."""
    header = ["NAMESPACE", "NAME", "PHASE", "PODS", "AGE", "OWNER", "REASON"]
    rows = [
        [
            state.namespace,
            state.name,
            str(state.phase),
            f"{state.ready}/{state.replicas}",
            short_duration(now - state.created),
            state.owner,
            f"{state.reason}: {state.message}" if wide and state.message else state.reason,
        ]
        for state in states
    ]
    return printable_lines(table(header, rows, without=() if all_namespaces else ("NAMESPACE",)))
