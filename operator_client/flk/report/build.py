"""Read what a report shows of a job, and build the report by pure functions. It says why a section has no data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import yaml

from flk.errors import FlkError, JobDeletedError, JobNotFoundError
from flk.health import cause_of, diagnose, page
from flk.jobs.answer import look
from flk.jobs.logs import LogLine, LogOptions, dump
from flk.jobs.state import State
from flk.jobs.telemetry import read_telemetry
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.observation import event_time, involved
from flk.observe.progress import read_telemetry_of
from flk.observe.reader import view_job
from flk.observe.redaction import kept_job, masked, secrets_of
from flk.observe.view import JobView
from flk.report.model import Excerpt, Moment, Report, Submitted
from flk.spec import labels
from flk.user.terminal import one_line, printable
from flk_runtime.contract import VERSION, foreign
from flk_runtime.contract.failure import Kind
from flk_runtime.contract.telemetry import Telemetry

MOMENTS: Final = 200  # the newest are kept
PODS: Final = 256  # those that have failed or do not run come first
LINE: Final = 1000  # characters of a line of a log
LINES: Final = 200  # of each excerpt

_FOREIGN: Final = "another tool has made this job, whose pods have no launcher of flk"
_NO_RECORD: Final = "no record of the launchers was found: the pods are gone, or they have not begun yet"
_UNTOLD: Final = (
    "neither a launcher nor the log of pod 0 tells what was measured, and nothing has kept it, as records in the "
    "cluster do (records.enabled of flk's chart); or the job does not measure (FLK_TELEMETRY=off)"
)
_NOT_TOLD: Final = (
    "the launchers tell of it at the end of an attempt and every five minutes, and of no step yet; of a script that "
    "tells no steps they tell none"
)
_WAITS: Final = "no pod of the job has started yet"


def build(
    view: JobView,
    state: State,
    *,
    telemetry: Telemetry | None,
    excerpts: Sequence[Excerpt],
    why_no_logs: str = "",
) -> Report:
    """Return the report about a job."""
    cause = cause_of(state.cause.code) if state.cause else None
    report = Report(
        made=view.now,
        version=VERSION,
        seen=view.now,
        gone=view.gone is not None,
        state=state,
        answer=diagnose(view),
        explanation=page(cause) if cause else "",
        submitted=_submitted(view),
        moments=_moments(view, state),
        pods=sorted(view.pods, key=lambda pod: (pod.is_up, pod.index))[:PODS],
        telemetry=telemetry,
        excerpts=[Excerpt(each.title, [printable(line)[:LINE] for line in each.lines[-LINES:]]) for each in excerpts],
        missing={},
    )
    report.missing.update(_missing(view, report, why_no_logs))
    return report


def _submitted(view: JobView) -> Submitted:
    job: Object = kept_job(view.job) if view.job else {}
    annotations = (job.get("metadata") or {}).get("annotations") or {}
    container = JobView(replace(view.seen, job=job), view.commands).container if job else {}
    try:
        spec = foreign.parse_object(annotations.get(labels.SPEC) or "{}")
    except foreign.ForeignError:
        spec = {}
    spec = {key: value for key, value in spec.items() if value not in (None, {}, [], "", False)}
    words, in_pod = spec.get("command"), [*(container.get("command") or []), *(container.get("args") or [])]
    words = words if words and isinstance(words, list) else in_pod
    variables = {
        str(each.get("name")): str(each["value"]) if "value" in each else _source(each.get("valueFrom"))
        for each in container.get("env") or []
    }
    return Submitted(
        command=shlex.join(map(str, words)),
        commit=str(annotations.get(labels.COMMIT, "")),
        version=str(annotations.get(labels.VERSION, "")),
        options=dict(_flat(spec)),
        variables=variables,
        file=yaml.safe_dump(spec, sort_keys=False, allow_unicode=True) if spec else "",
    )


def _source(value_from: Any) -> str:
    """Return where the value of a variable comes from, which is never shown itself."""
    for kind, source in (value_from or {}).items():
        where = [str(source.get(key)) for key in ("name", "key", "fieldPath", "resource") if source.get(key)]
        return f"from {kind.removesuffix('Ref')} {':'.join(where)}"
    return ""


def _flat(node: Any, path: str = "") -> list[tuple[str, str]]:
    """Return the values below a node as text, by their paths."""
    if isinstance(node, dict) and node:
        return [pair for key, value in node.items() for pair in _flat(value, f"{path}.{key}" if path else str(key))]
    text = shlex.join(map(str, node)) if isinstance(node, list) and all(isinstance(n, str) for n in node) else node
    return [(path, text if isinstance(text, str) else json.dumps(text))] if path else []


def _moments(view: JobView, state: State) -> list[Moment]:
    found = [Moment(state.created, "state", f"created{f' by {state.owner}' if state.owner else ''}")]
    for attempt in state.attempts:
        begin = f" at step {attempt.restored}" if attempt.restored is not None else ""
        source = f", from {attempt.restored_from}" if attempt.restored_from in ("memory", "storage") else ""
        found.append(Moment(attempt.started, "attempt", f"attempt {attempt.number} starts{begin}{source}"))
        if (failure := attempt.failure) and failure.kind is Kind.HANG:
            limit = f" ({failure.traceback.splitlines()[0]})" if failure.traceback else ""
            found.append(Moment(failure.time, "hang", f"a hang is found in attempt {attempt.number}{limit}"))
        if attempt.ended and attempt.outcome != "running":
            why = f": {attempt.cause}" if attempt.cause else ""
            found.append(Moment(attempt.ended, "end", f"attempt {attempt.number} {attempt.outcome}{why}"))
    if view.standstill:
        found.append(Moment(view.standstill.since, "hang", view.standstill.summary))
    for event in view.events:
        if event.get("type") == "Warning":
            about = involved(event)
            count = f" (x{event['count']})" if (event.get("count") or 1) > 1 else ""
            text = f"{about.get('kind', '')} {about.get('name', '')}: {event.get('reason')}: {event.get('message')}"
            found.append(Moment(event_time(event), "event", one_line(text)[:LINE] + count))
    if state.ended:
        found.append(Moment(state.ended, "state", f"the job ended: {state.phase.value}"))
    return sorted((each for each in found if each.time), key=lambda each: each.time)[-MOMENTS:]


def _missing(view: JobView, report: Report, why_no_logs: str) -> dict[str, str]:
    """Return why sections have no data, by their names."""
    state, telemetry = report.state, report.telemetry
    waits = view.started is None and not view.records and view.gone is None
    no_record, untold = (_NO_RECORD, _UNTOLD) if view.from_flk else (_FOREIGN, _FOREIGN)
    if waits:
        no_record = untold = _WAITS
    found: dict[str, str] = {}
    if not report.submitted.options:
        found["submitted"] = _why_no_options(view)
    if not state.attempts:
        found["attempts"] = no_record
    if state.goodput is None or state.goodput.share is None:
        found["goodput"] = _NOT_TOLD if view.records else no_record
    if telemetry is None or not telemetry.history:
        found["history"] = _WAITS if waits else f"no line of metrics was found; {untold}"
    if telemetry is None or not telemetry.ranks:
        found["ranks"] = untold
    if telemetry is None or not telemetry.pods:
        found["usage"] = untold
    if not report.pods:
        found["pods"] = "the job has no pods"
    if not any(excerpt.lines for excerpt in report.excerpts):
        found["logs"] = why_no_logs or f"no lines were found; {view.flk('logs')} shows what there is"
    return found


def _why_no_options(view: JobView) -> str:
    if not view.job:
        return "only the launchers' record is left of the job, without its object"
    if view.from_flk:
        return "the options of flk.yaml are not known: an older flk has archived the job"
    return "another tool has made this job; what follows is read from its object"


TAIL: Final = 500  # last lines of pod 0 that are read
SHOWN: Final = 60  # of them that are shown
_UNKNOWN_TIME: Final = "1970-01-01T00:00:00Z"  # of lines that were archived without their times


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
    unread = ""
    lines: list[LogLine] = []
    try:
        lines.extend(dump(client, name, LogOptions(pods=frozenset({"0"}), tail=TAIL)))
    except JobDeletedError:
        pass  # which comes after the lines that are kept
    except FlkError as error:
        unread = f"the logs cannot be read: {error}"
    ends = [line.text for line in lines if not line.note][-SHOWN:]
    excerpt = Excerpt(f"The last lines of pod {view.pods[0].name if view.pods else 0}", ends)
    report = build(
        view,
        state,
        telemetry=_telemetry(client, name, lines),
        excerpts=[excerpt] if ends else [],
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
