"""`flk status`: show the state of jobs, their attempts and their pods, and why they ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

from flk.cli.options import Context, Namespace, note, output_format
from flk.cli.output import cut, items_text, json_text, phase_style, progress_line, table, width_of, wrapped
from flk.cli.several import Chosen, Jobs, Selector, worst
from flk.errors import FlkError
from flk.spec.units import short_duration
from flk.user.terminal import printable, styled
from flk_runtime.contract.quantities import format_ranges, plural
from flk_runtime.contract.record import TIME_CAUSES, Goodput

if TYPE_CHECKING:
    from flk.jobs.state import AttemptState, State
    from flk.observe.client import JobClient, JobRef
    from flk.observe.model import PodState
    from flk.observe.progress import Progress


def status(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
    output: Annotated[
        str,
        output_format("text", "wide", "json", explained="text, wide (all pods, in full), json"),
    ] = "text",
) -> int | None:
    """Show the status of a job: its phase, its attempts and why each ended, its pods and why they do not run.

    Exits with 103 if a job was deleted before it had ended, else with 0; `flk wait --timeout 0` exits with the job's
    exit code. `flk top` shows a job live.
    """
    from flk.jobs.listing import look_at_all

    chosen = Chosen.of(jobs, selector, context, namespace, command="status")
    notes: dict[JobRef, str] = {}
    as_data: list[dict[str, Any]] = []  # the states, for JSON
    codes = []
    for job, looked in look_at_all(chosen.client, chosen.jobs, notes.__setitem__):
        try:
            if isinstance(looked, FlkError):
                raise looked
            if job in notes:
                note(notes[job])
            state = looked.state
            if output == "json":
                as_data.append(state.to_dict())
            else:
                text = status_text(state, chosen.client.for_job(job), wide=output == "wide")
                sys.stdout.write(text if job == chosen.jobs[0] else f"\n{text}")
                sys.stdout.flush()
            codes.append(state.code if state.was_deleted else 0)
        except FlkError as error:
            codes.append(chosen.failed(job, error))
    if output == "json":
        print(items_text(as_data) if chosen.as_list else json_text(as_data[0]))
    return worst(codes)


_SHOWN: Final = 32  # pods in the text format
_LEAST: Final = 1.0  # seconds that a cause must have taken to be in the line about the goodput
_REASON: Final = 60  # characters of a pod's reason where the width is not known
_MEASURED: Final = ("STEP", "STEP TIME", "LOSS")  # columns of a table of pods whose ranks tell of their steps


def status_text(state: State, client: JobClient, *, wide: bool) -> str:
    """Return the output of `flk status`. ``wide`` shows all pods, a row for each rank, and messages in full."""
    now, commands = client.now(), client.commands
    since = f" for {short_duration(now - state.since)}" if state.since and not state.finished else ""
    lines = [
        f"{state.name}   {state.phase}{since}   in namespace {state.namespace}",
        f"{_shape(state)}, created {short_duration(now - state.created)} ago"
        f"{f' by {state.owner}' if state.owner else ''}, image {state.image}",
    ]
    if state.message:
        lines.append(f"{state.reason}: {state.message}" if state.reason and not state.failure else state.message)
    if state.warning:
        lines.append(f"warning: {state.warning}")
    if state.no_retry_reason:
        lines.append(state.no_retry_reason)
    if state.cause and not state.failure:
        lines.append(f"{commands.flk('why', state.name)} shows the evidence and the remedy")
    if state.unread:
        lines.append(
            f"attempts, steps and checkpoints are not known: the log of pod 0 could not be read: {state.unread}"
        )
    if state.progress:
        lines.append(progress_line(state))
    if state.saved_step is not None:
        lines.append(_checkpoint_line(state, now))
    if state.goodput and state.goodput.share is not None:
        lines.append(_goodput_line(state.goodput))
    if state.attempts:
        lines += ["", f"attempt {state.attempt}{_used(state)}:", *_attempts(state, now, wide=wide)]
    if state.pods:
        lines += ["", *pods_table(state, wide=wide)]
    for each in state.quarantine:
        until = f" for {short_duration(each.until - now)} more" if each.until else ""
        cordon = commands.kubectl(f"cordon {each.node}", namespaced=False)
        lines.append(f"{each.node} is in quarantine{until}: {each.reason or 'pods have failed there repeatedly'}")
        lines.append(
            f"{cordon} keeps all jobs off it; {commands.flk('why', state.name)} says how its other pods avoid it"
        )
    if state.slow:
        lines += ["", *(slow.summary for slow in state.slow)]
    if state.failure and state.failure.details:
        lines += ["", *(f"  {line}" for line in state.failure.details.splitlines())]
    width = 0 if wide else width_of(sys.stdout)
    shown = [part for line in lines for part in wrapped(printable(line), width)]
    phase = str(state.phase)
    shown[0] = shown[0].replace(f" {phase}", f" {styled(phase, phase_style(phase), sys.stdout)}", 1)
    return "".join(f"{line}\n" for line in shown)


def _checkpoint_line(state: State, now: float) -> str:
    """Return one line about the newest checkpoint.

    Launchers tell of it from time to time, so more may have been saved since.
    """
    in_storage = "" if state.stored_step is None else f", in storage: step {state.stored_step}"
    told = "" if state.finished or not state.goodput else f", as of {short_duration(now - state.goodput.until)} ago"
    return f"newest checkpoint: step {state.saved_step}{in_storage}{told}"


def _goodput_line(goodput: Goodput) -> str:
    """Return one line about what the time of a job has gone into: the goodput, and each cause with its time."""
    spent = [(cause, goodput.seconds.get(cause, 0.0)) for cause in TIME_CAUSES]
    causes = ", ".join(f"{cause} {short_duration(seconds)}" for cause, seconds in spent if seconds >= _LEAST)
    return f"goodput {goodput.share:.0%} of {short_duration(goodput.total)}{causes and f': {causes}'}"


def _used(state: State) -> str:
    """Return how many restarts and disruptions the job has used."""
    if state.max_restarts is None:
        return ""
    return (
        f", {state.restarts} of {state.max_restarts} restarts and "
        f"{state.disruptions} of {state.max_disruptions} disruptions used"
    )


def _shape(state: State) -> str:
    size = state.size or state.replicas - state.spares
    pods, ranks = plural(size, "pod"), plural(state.processes, "rank")
    shape = f"{pods} x {ranks}" if state.processes > 1 else plural(size, "rank")
    if state.min_size < state.max_size:
        shape += f", elastic from {state.min_size} to {state.max_size} pods"
        if size != state.replicas:
            shape += f" ({state.replicas} wanted)"
    return shape + (f", {plural(state.spares, 'spare')}" if state.spares else "")


def _attempts(state: State, now: float, *, wide: bool) -> list[str]:
    """Return the table of attempts. Attempts in a row that failed in the same way are one line."""
    lines: list[list[AttemptState]] = []  # the attempts of each line
    elastic = state.min_size < state.max_size
    for attempt in state.attempts:
        if lines and not wide and attempt.cause and attempt.cause == lines[-1][-1].cause:
            lines[-1].append(attempt)
        else:
            lines.append([attempt])
    cells = []
    for line in lines:
        first, last = line[0], line[-1]
        numbers = str(first.number) if first is last else f"{first.number}-{last.number}"
        time = short_duration((last.ended or now) - first.started)
        count = last.number - first.number + 1
        cause = last.cause + (f" (x{count})" if count > 1 else "")
        cells.append([numbers, str(last.pods or ""), last.outcome, time, _begin(last), cause])
    header = ["ATTEMPT", "PODS", "OUTCOME", "TIME", "FROM STEP", "CAUSE"]
    restored = any(attempt.restored is not None for attempt in state.attempts[1:])
    left_out = {name for name, shown in (("PODS", elastic), ("FROM STEP", restored)) if not shown}
    return table(header, cells, without=left_out, width=0 if wide else width_of(sys.stdout))


def _begin(attempt: AttemptState) -> str:
    """Return the step at which an attempt began, and how many steps of the attempt before it were lost."""
    if attempt.restored is None:
        return ""
    source = f" in {attempt.restored_from}" if attempt.restored_from in ("memory", "storage") else ""
    lost = "" if attempt.steps_lost is None else f", {plural(attempt.steps_lost, 'step')} lost"
    return f"{attempt.restored}{source}{lost}"


def pods_table(state: State, *, wide: bool) -> list[str]:
    """Return the table of pods, or with ``wide`` of ranks. Pods of one worker make their steps together."""
    progress = {item.rank: item for item in state.progress}
    worker_size = len(state.pods) // state.workers * state.processes  # ranks of one worker
    shown = state.pods if wide else _pods_shown(state.pods)
    header = ["POD", "RANK" if wide else "RANKS", "PHASE", "RESTARTS", "NODE", *_MEASURED, "REASON"]
    rows = []
    for pod in shown:
        # A pod that takes part in no attempt has no ranks, and still a row.
        ranks_of_rows = [[rank] for rank in pod.ranks] if wide and pod.ranks else [pod.ranks]
        for ranks in ranks_of_rows:
            own = next((progress[rank] for rank in ranks if rank in progress), None)
            of_worker = None
            if ranks and pod.phase == "Running":
                of_worker = progress.get(ranks[0] // worker_size * worker_size)  # the first rank tells of all
            cells = [pod.name, format_ranges(ranks), str(pod.phase), str(pod.restarts), pod.node]
            rows.append([*cells, *_measured(own, of_worker), _reason(pod, state, wide=wide)])
    width = 0 if wide else width_of(sys.stdout)
    lines = table(header, rows, without=() if progress else _MEASURED, width=width)
    left = len(state.pods) - len(shown)
    if left:
        lines.append(f"and {plural(left, 'more pod')} (flk status -o wide shows all)")
    return lines


def _pods_shown(pods: list[PodState]) -> list[PodState]:
    """Return the pods that a limited table shows: of more than fit, pod 0 and those in trouble, the failed first."""
    if len(pods) <= _SHOWN:
        return pods
    chosen = [pod for pod in pods if pod.index == 0 or pod.phase not in ("Running", "Succeeded")]
    if len(chosen) > _SHOWN:
        chosen.sort(key=lambda pod: pod.phase not in ("Failed", "Unknown"))
    return chosen[:_SHOWN]


def _measured(own: Progress | None, of_worker: Progress | None) -> list[str]:
    """Return step, time and loss of a rank. A rank that prints none has the step that its worker makes together."""
    if own is None:
        return [str(of_worker.step) if of_worker else "", "", ""]
    time = "" if own.step_time is None else f"{own.step_time:.3g}s"
    return [str(own.step), time, "" if own.loss is None else f"{own.loss:.4g}"]


def _reason(pod: PodState, state: State, *, wide: bool) -> str:
    """Return why a pod does not run; without its message if the job's cause, shown above, concerns the pod."""
    if not wide and state.cause and pod.name in state.cause.pods:
        return pod.reason
    last = pod.message.strip().splitlines()[-1] if pod.message.strip() else ""
    text = f"{pod.reason}: {last}" if pod.reason and last else pod.reason or last
    return text if wide else cut(text, _REASON)
