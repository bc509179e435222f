"""Read what a report shows of a job: its objects, what is archived of it, its measurements and its logs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from flk.errors import FlkError, JobDeletedError, JobNotFoundError
from flk.jobs.answer import last_answer, look
from flk.jobs.logs import LogLine, LogOptions, dump, first_error
from flk.jobs.state import Phase
from flk.jobs.telemetry import read_telemetry
from flk.observe.client import JobClient
from flk.observe.progress import read_telemetry_of
from flk.observe.reader import view_job
from flk.observe.redaction import masked, secrets_of
from flk.report.build import build
from flk.report.model import Excerpt, Report
from flk_runtime.contract.telemetry import Telemetry

TAIL: Final = 500  # last lines of pod 0 that are read
SHOWN: Final = 60  # of them that are shown
_UNKNOWN_TIME: Final = "1970-01-01T00:00:00Z"  # of lines that were archived without their times
ERROR_LINES: Final = 200  # lines around the first error that are shown


def collect(client: JobClient, name: str, note: Callable[[str], None] = lambda text: None) -> Report:
    """Return the report about a job now, or from the launchers' record of one that is gone, without its secrets.

    ``note`` is called if the job is gone. Raises JobNotFoundError if there is neither such a job nor a record of one.
    """
    answer = look(client, name, note)
    state, view = answer.state, answer.view
    if view is None and answer.gone:
        shown = client.commands.flk("status", name)
        raise JobNotFoundError(
            f"job {name} is gone, and its launchers have kept no record in the cluster, which a report needs",
            hint=f"{shown} shows the last answer; records.enabled of flk's chart keeps records",
        )
    view = view or view_job(client, name)
    last = last_answer(client, name, view.uid)
    excerpts: list[Excerpt] = []
    unread = ""
    lines: list[LogLine] = []
    try:
        if state.phase in (Phase.FAILED, Phase.STUCK, Phase.RESTARTING, Phase.DELETED):
            error = itertools.islice(first_error(client, name, LogOptions()), ERROR_LINES)
            excerpts.append(Excerpt("Around the first error", [line.text for line in error]))
        lines.extend(dump(client, name, LogOptions(pods=frozenset({"0"}), tail=TAIL)))
    except JobDeletedError:
        pass  # which comes after the lines that are kept
    except FlkError as error:
        unread = f"the logs cannot be read: {error}"
    ends = [line.text for line in lines if not line.note][-SHOWN:]
    excerpts.append(Excerpt(f"The last lines of pod {view.pods[0].name if view.pods else 0}", ends))
    report = build(
        view,
        state,
        telemetry=_telemetry(client, name, lines),
        excerpts=[each for each in excerpts if each.lines],
        diff=last.diff if last else "",
        why_no_logs=unread,
    )
    return masked(report, secrets_of(view.job))


def _telemetry(client: JobClient, name: str, lines: Sequence[LogLine]) -> Telemetry | None:
    """Return the measurements of a job, or those that the last lines of its pod 0 tell; None without any."""
    try:
        found = read_telemetry(client, name)
    except FlkError:
        found = Telemetry(client.now())  # it is gone, and its launchers have archived nothing
    if not found.history:
        told = [f"{line.time or _UNKNOWN_TIME} {line.text}" for line in lines if not line.note]
        of_lines = read_telemetry_of(told, found.time)
        total = found.total_steps or of_lines.total_steps
        found = replace(found, history=of_lines.history, total_steps=total, diverged=of_lines.diverged)
    return found if found.history or found.ranks or found.pods else None
