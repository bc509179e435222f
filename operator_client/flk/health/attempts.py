"""Attempts without progress: those that end one after the other without a further step, and one in which all wait."""

from __future__ import annotations

from typing import Final

from flk.health.cause import Cause, Found
from flk.health.failure import exit_code_of
from flk.observe.model import Evidence
from flk.observe.view import JobView
from flk_runtime.contract.failure import ExitCode, Failure
from flk_runtime.contract.quantities import numbered, plural
from flk_runtime.contract.record import Attempt

FRUITLESS: Final = 3  # attempts in a row without a further step before flk says so
SHORT: Final = 120.0  # seconds: a longer attempt of a script that tells no steps may have made some


def _no_progress(view: JobView) -> Found | None:
    if view.record is None or view.failed or view.suspended:
        return None
    fruitless, step = _fruitless(view, view.record.attempts)
    if len(fruitless) < FRUITLESS:
        return None
    failure = fruitless[-1][1]
    told = [
        Evidence(f"record of the launchers: attempt {attempt.number + 1}", each.summary, time=attempt.ended or 0.0)
        for attempt, each in (fruitless[0], fruitless[-1])
    ]
    where = "no step is known" if step is None else f"the last step is {step}"
    which = numbered("attempt", [attempt.number + 1 for attempt, _ in fruitless])
    used = f"{view.record.restarts} of {view.record.max_restarts} restarts"
    return Found(
        f"{plural(len(fruitless), 'attempt')} in a row ended without a further step ({which}; {where}), the last one "
        f"with: {failure.summary}",
        f"{view.flk('logs')} shows what was printed; the job ends when its restarts are used up ({used} and "
        f"{view.record.disruptions} of {view.record.max_disruptions} disruptions are), or with {view.flk('delete')}",
        told,
        [failure.pod_name] if failure.pod_name else [],
        since=fruitless[0][0].ended or 0.0,
        exit_code=exit_code_of(failure),
    )


def is_advancing(view: JobView) -> bool:
    """Return whether attempts are known, and they make further steps."""
    attempts = view.record.attempts if view.record else []
    return bool(attempts) and len(_fruitless(view, attempts)[0]) < FRUITLESS


def _fruitless(view: JobView, attempts: list[Attempt]) -> tuple[list[tuple[Attempt, Failure]], int | None]:
    """Return the latest attempts in a row that ended without a further step, and the last step that is known."""
    found: list[tuple[Attempt, Failure]] = []
    best: int | None = None
    for attempt in attempts:
        if attempt.failure is None:
            found = [] if _goes_on(view, attempt, found, best) else found
        elif not attempt.failure.kind.meaning.planned:
            found = [] if _advanced(attempt, best) else [*found, (attempt, attempt.failure)]
        reached = [step for step in (best, attempt.restored, attempt.step) if step is not None]
        best = max(reached, default=None)
    return found, best


def _advanced(attempt: Attempt, best: int | None) -> bool:
    """Return whether an attempt that has ended made a step that no attempt before it had made."""
    if attempt.step is None:
        return _seconds(attempt, attempt.ended) >= SHORT
    return attempt.step > max(best or 0, attempt.restored or 0)


def _goes_on(view: JobView, attempt: Attempt, before: list[tuple[Attempt, Failure]], best: int | None) -> bool:
    """Return whether the running attempt has got further than those before it: by its metrics, or else by its time."""
    if any(progress.step > (best or 0) and progress.time >= attempt.started for progress in view.seen.progress):
        return True
    longest = max((_seconds(each, each.ended) for each, _ in before), default=0.0)
    return _seconds(attempt, view.now) >= longest + SHORT


def _seconds(attempt: Attempt, until: float | None) -> float:
    return (until or attempt.started) - attempt.started


def _standstill(view: JobView) -> Found | None:
    found = view.standstill
    if found is None or view.suspended:
        return None
    return Found(
        found.summary,
        f"{view.flk('stacks')} shows what every rank does now; {view.flk('delete')} ends the job, which its "
        "--hang-timeout does too",
        [Evidence("record of the launchers", found.text, time=found.since)],
        [found.pod_name],
        since=found.since,
    )


CAUSES: Final = (
    Cause(
        "NoProgress",
        _no_progress,
        ExitCode.TRAINING,
        cured_by="another attempt",
        goes_on=True,
    ),
    Cause(
        "Standstill",
        _standstill,
        ExitCode.RUNNING,
        cured_by="the rank that the others wait for",
        goes_on=True,
    ),
)
