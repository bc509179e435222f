"""The restart policy: `RULES` is the table of what follows a failure, `decide` applies it to a history of attempts.

A failure of the training code uses one of the job's restarts. A disruption uses one of its disruptions, which are more:
so Kubernetes calls what happens to pods, their nodes and their network. The functions are pure: the leader of the
rendezvous asks `decide`, and any launcher that knows the history gets the same answer.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.settings import Limits

QUICK: Final = 60.0  # seconds; an attempt that failed sooner and without progress counts for the delay
ADDRESS_DELAY: Final = 1.0  # seconds in which the process that holds an address may end
_SIGNATURE_LIMIT: Final = 200  # characters of a message that are compared; histories keep 300
_VARYING: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")  # addresses and numbers
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

LAUNCHER: Final = "launcher"
OPERATOR: Final = "operator"
NOBODY: Final = ""
RESTARTS: Final = "restarts"
DISRUPTIONS: Final = "disruptions"


@dataclass(frozen=True)
class Rule:
    """What follows one kind of failure."""

    what: str  # what happened, as the documentation says it
    # Whether a failure is of this kind. The first rule that matches counts. None: `decide` never gets such a failure.
    matches: Callable[[Failure], bool] | None
    code: ExitCode | None  # of the job, if it ends so; None: it does not end
    retried_by: str  # LAUNCHER: all ranks start again in the same pods; OPERATOR: it replaces the pod first; NOBODY
    budget: str  # RESTARTS, DISRUPTIONS, or empty
    reason: str = ""  # of a final failure: why it is not retried
    final_if_same: bool = False  # the same failure twice in a row without progress is final
    delay: float = 0.0  # seconds before the attempt that follows the first such failure


def _kind(kind: str) -> Callable[[Failure], bool]:
    return lambda failure: failure.kind == kind


def _was_killed_from_outside(failure: Failure) -> bool:
    number = failure.signal if failure.kind == "signal" else (failure.exit_code or 0) - 128
    return failure.kind in ("signal", "exit") and number in _FROM_OUTSIDE


_SAME_WAY: Final = "the next attempt would fail in the same way"

RULES: Final = (
    Rule(
        "the environment, the command or an option is wrong; a fault of the preflight; the image has no torch",
        _kind("usage"), ExitCode.USAGE, NOBODY, "", _SAME_WAY,
    ),
    Rule("the job's deadline passed", _kind("deadline"), ExitCode.TIMEOUT, NOBODY, "", "the time of the job is over"),
    Rule(
        "a rank finds no space on a file system (ENOSPC, EDQUOT)",
        _kind("disk_full"), ExitCode.INFRASTRUCTURE, NOBODY, "", "it stays full until somebody frees space",
    ),
    Rule(
        "a pod never joins within FLK_JOIN_TIMEOUT, or pod 0 does not answer for as long",
        None, ExitCode.INFRASTRUCTURE, NOBODY, "", "the other pods have waited long enough",
    ),
    Rule(
        "a rank fails to read or write a file (EIO, ESTALE)",
        _kind("io"), ExitCode.INFRASTRUCTURE, LAUNCHER, DISRUPTIONS,
    ),
    Rule(
        "a rank's GPU is lost (an ECC or NVLink error, a GPU that fell off the bus)",
        _kind("gpu"), ExitCode.INFRASTRUCTURE, OPERATOR, DISRUPTIONS,
    ),
    Rule(
        "a rank survives SIGKILL for FLK_KILL_TIMEOUT (30 s)",
        _kind("unkillable"), ExitCode.INFRASTRUCTURE, OPERATOR, DISRUPTIONS,
    ),
    Rule(
        "a pod receives SIGTERM: a drain, an eviction, a preemption",
        _kind("preempted"), ExitCode.INFRASTRUCTURE, OPERATOR, DISRUPTIONS,
    ),
    Rule(
        "a pod joins an elastic job, or leaves it after SIGTERM",
        _kind("resized"), None, LAUNCHER, "",
    ),
    Rule(
        "a pod is lost: it is deleted, its node is gone, or its launcher is killed, at the memory limit for example",
        _kind("lost"), ExitCode.INFRASTRUCTURE, OPERATOR, DISRUPTIONS,
    ),
    Rule(
        "ranks lose the connection to each other, and none of them failed",
        lambda failure: failure.is_lost_connection, ExitCode.INFRASTRUCTURE, LAUNCHER, DISRUPTIONS,
    ),
    Rule(
        "the ranks do not find each other in the preflight",
        _kind("rendezvous"), ExitCode.INFRASTRUCTURE, LAUNCHER, RESTARTS,
    ),
    Rule(
        "a rank finds its address in use",
        _kind("address"), ExitCode.TRAINING, LAUNCHER, RESTARTS, delay=ADDRESS_DELAY,
    ),
    Rule(
        "a rank is killed from outside (SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGQUIT)",
        _was_killed_from_outside, ExitCode.TRAINING, LAUNCHER, RESTARTS,
    ),
    Rule(
        "a rank dies of another signal (SIGSEGV, SIGABRT and so on)",
        _kind("signal"), ExitCode.TRAINING, LAUNCHER, RESTARTS, final_if_same=True,
    ),
    Rule(
        "a rank is killed at the memory limit",
        _kind("oom"), ExitCode.INFRASTRUCTURE, LAUNCHER, RESTARTS, final_if_same=True,
    ),
    Rule("a rank hangs", _kind("hang"), ExitCode.INFRASTRUCTURE, LAUNCHER, RESTARTS, final_if_same=True),
    Rule(
        "a rank ends before the others, with an exit code or with 0",
        _kind("exit"), ExitCode.TRAINING, LAUNCHER, RESTARTS, final_if_same=True,
    ),
    Rule(
        "a rank raises another exception",
        lambda failure: True, ExitCode.TRAINING, LAUNCHER, RESTARTS, final_if_same=True,
    ),
    Rule("the image has no Python", None, ExitCode.USAGE, NOBODY, "", _SAME_WAY),
    Rule("the launcher itself fails, by a bug of flk", None, ExitCode.ERROR, NOBODY, "", _SAME_WAY),
    Rule("the image has no shell, or is for another architecture", None, None, OPERATOR, ""),
)  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What follows the last attempt of a history."""

    restarts: int = 0  # used, that of the next attempt included
    disruptions: int = 0
    delay: float = 0.0  # seconds from the end of the last attempt until the next one may start
    verdict: str = ""  # why no attempt follows; empty: one follows

    @property
    def restart(self) -> bool:
        """Whether an attempt follows."""
        return not self.verdict


def rule_for(failure: Failure) -> Rule:
    """The rule for a failure."""
    return next(rule for rule in RULES if rule.matches and rule.matches(failure))


def needs_new_pod(failure: Failure) -> bool:
    """Return whether the pod of a failure exists, but must be replaced before another attempt."""
    return failure.kind in ("gpu", "unkillable")


def decide(history: Sequence[Attempt], limits: Limits) -> Decision:
    """What follows the last attempt of ``history``, which may have been shortened at its beginning."""
    if not history:
        return Decision()
    last = history[-1]
    failure = last.failure
    used = Decision(last.restarts, last.disruptions)
    if failure is None:
        return used
    rule = rule_for(failure)
    previous = history[-2] if len(history) > 1 else None
    if not rule.retried_by:
        return replace(used, verdict=f"not retried: {rule.reason}")
    if rule.final_if_same and not limits.retry_same and previous and is_same_again(previous, last):
        where = f" at step {last.step}" if last.step is not None else ""
        return replace(used, verdict=f"not retried: failed twice{where} with the same error")
    if limits.reset and _duration(last) >= limits.reset and made_progress(previous, last):
        used = Decision()
    if not rule.budget:
        return used
    number, limit = getattr(used, rule.budget), getattr(limits, rule.budget)
    if number >= limit:
        return replace(used, verdict=f"not retried: {_spent(limit, rule.budget)}")
    delay = _delay(history, rule, limits)
    if rule.budget == RESTARTS:
        return replace(used, restarts=number + 1, delay=delay)
    return replace(used, disruptions=number + 1, delay=delay)


def is_same_again(previous: Attempt, last: Attempt) -> bool:
    """Return whether an attempt failed like the one before it, and no later."""
    same = previous.failure and last.failure and signature(previous.failure) == signature(last.failure)
    return bool(same) and not made_progress(previous, last)


def signature(failure: Failure) -> tuple[object, ...]:
    """What equal failures have in common: not their ranks, nor the numbers and addresses in their messages."""
    message = _VARYING.sub("#", failure.message)[:_SIGNATURE_LIMIT]
    return failure.kind, failure.type, message, failure.exit_code, failure.signal


def made_progress(previous: Attempt | None, last: Attempt) -> bool:
    """Return whether an attempt completed a step that the one before it had not completed.

    Where neither has reported its steps (a script without flk's library), a minute counts as progress.
    """
    before = previous.step if previous else None
    if last.step is None and before is None:
        return _duration(last) >= QUICK
    return (last.step or 0) > (before or 0)


def _delay(history: Sequence[Attempt], rule: Rule, limits: Limits) -> float:
    """Seconds to wait: none after the first failure, then 1, 2, 4 and so on, while attempts fail quickly in a row."""
    quick = 0
    for index in range(len(history) - 1, -1, -1):
        attempt, previous = history[index], history[index - 1] if index else None
        if (
            attempt.failure is None
            or attempt.failure.kind == "resized"
            or _duration(attempt) >= QUICK
            or made_progress(previous, attempt)
        ):
            break
        quick += 1
    return min(limits.backoff, max(rule.delay, 2.0 ** (quick - 2) if quick > 1 else 0.0))


def _spent(limit: int, budget: str) -> str:
    if limit == 0:
        return f"the job allows no {budget}"
    return f"its only {budget[:-1]} is used" if limit == 1 else f"all {limit} {budget} are used"


def _duration(attempt: Attempt) -> float:
    return attempt.ended - attempt.started if attempt.ended is not None else 0.0
