"""Read what a report shows of a job: its objects, what is archived of it, its measurements and its logs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from flk.errors import FlkError
from flk.jobs.logs import LogLine, LogOptions, dump, first_error
from flk.jobs.state import Phase
from flk.jobs.wait import look
from flk.observe import archive
from flk.observe.client import JobClient
from flk.report.build import build
from flk.report.history import telemetry_of
from flk.report.masking import masked, secrets_of
from flk.report.model import Excerpt, Report

TAIL: Final = 20_000  # last lines of the log of pod 0, in which metrics are looked for
SHOWN: Final = 60  # lines of pod 0 that are shown
ERROR_LINES: Final = 200  # lines around the first error that are shown


def collect(client: JobClient, name: str, note: Callable[[str], None] = lambda text: None) -> Report:
    """Return the report about a job now, or about what is archived of one that is gone, without its secrets.

    ``note`` is called if the job is gone. Raises JobNotFoundError if there is no such job and nothing is archived of
    one.
    """
    view, state = look(client, name, note)
    kept = archive.find(client, name, view.uid or None)
    excerpts: list[Excerpt] = []
    unread = ""
    lines: list[LogLine] = []
    try:
        if state.phase in (Phase.FAILED, Phase.STUCK, Phase.RESTARTING, Phase.DELETED):
            around = itertools.islice(first_error(client, name, LogOptions()), ERROR_LINES)
            excerpts.append(Excerpt("Around the first error", [line.text for line in around]))
        lines = list(dump(client, name, LogOptions(pods=frozenset({"0"}), tail=TAIL)))
        shown = [line.text for line in lines if not line.note][-SHOWN:]
        excerpts.append(Excerpt(f"The last lines of pod {view.pods[0].name if view.pods else 0}", shown))
    except FlkError as error:
        unread = f"the logs cannot be read: {error}"
    report = build(
        view,
        state,
        telemetry=telemetry_of(lines),
        excerpts=[each for each in excerpts if each.lines],
        states=kept.states if kept else (),
        why_no_logs=unread,
    )
    return masked(report, secrets_of(view.job))
