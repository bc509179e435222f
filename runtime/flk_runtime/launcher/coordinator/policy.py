"""The root cause of an attempt's end, and the restart policy.

`Failures` keeps what all pods have reported, and finds the root cause among it. `decide` applies the table of the kinds
of failures to a history of attempts. It is a pure function: the leader asks it, and any launcher that knows the history
gets the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flk_runtime.contract.failure import Budget, Failure, Kind, Meaning, Retry, root_cause
from flk_runtime.contract.quantities import often
from flk_runtime.contract.record import Attempt
from flk_runtime.errors import StorageError
from flk_runtime.launcher.settings import Limits
from flk_runtime.launcher.transport.messages import DISCONNECTED, Join

# Exceptions before the first step that another attempt with the same files would raise again.
_OF_THE_CODE: Final = frozenset({"SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError"})
QUICK: Final = 60.0  # seconds; ranks that tell no steps made progress if their attempt lasted as long


@dataclass(frozen=True)
class Decision:
    """A decision: whether and when another attempt follows the last one of a history."""

    restarts: int = 0  # used, the restart for the next attempt included
    disruptions: int = 0
    delay: float = 0.0  # seconds from the end of the last attempt until the next one may start
    no_retry_reason: str = ""  # why no attempt follows; empty: one follows

    @property
    def restart(self) -> bool:
        """Whether an attempt follows."""
        return not self.no_retry_reason


def final_reason(failure: Failure) -> str:
    """Why an attempt that ended with this failure is not followed by another, whatever the limits are; may be empty."""
    reason = failure.kind.meaning.reason
    return f"not retried: {reason}" if reason else ""


def decide(history: Sequence[Attempt], limits: Limits) -> Decision:
    """Decide what follows the last attempt of ``history``, which may have been shortened at its beginning."""
    if not history:
        return Decision()
    last = history[-1]
    failure = last.failure
    used = Decision(last.restarts, last.disruptions)
    if failure is None:
        return used
    meaning = failure.kind.meaning
    if meaning.retried_by is Retry.NOBODY:
        return replace(used, no_retry_reason=final_reason(failure))
    begun = any(attempt.step or attempt.restored for attempt in history) or made_progress(None, last)
    if _is_of_the_code(failure) and not begun and not limits.retry_same:
        return replace(used, no_retry_reason="not retried: the code fails in this way at each start")
    times = _times_in_a_row(history)
    if meaning.final_after and not limits.retry_same and times >= meaning.final_after:
        where = f" at step {last.step}" if last.step is not None else ""
        return replace(used, no_retry_reason=f"not retried: failed {often(times)}{where} with the same error")
    if limits.reset and _duration(last) >= limits.reset and made_progress(history[-2] if history[1:] else None, last):
        used = Decision()
    if meaning.budget is Budget.NONE:
        return used
    number, limit = getattr(used, meaning.budget), getattr(limits, meaning.budget)
    if number >= limit:
        return replace(used, no_retry_reason=f"not retried: {_spent(limit, meaning.budget)}")
    delay = _delay(history, meaning, limits)
    if meaning.budget is Budget.RESTARTS:
        return replace(used, restarts=number + 1, delay=delay)
    return replace(used, disruptions=number + 1, delay=delay)


def _is_of_the_code(failure: Failure) -> bool:
    """Whether each start fails so: not a library that one node lacks, nor a file that is read amiss."""
    of_a_name = failure.type == "ImportError" and failure.message.startswith("cannot import name")
    return of_a_name or (failure.type in _OF_THE_CODE and "null bytes" not in failure.message)


def _times_in_a_row(history: Sequence[Attempt]) -> int:
    """How many of the last attempts have failed in the same way, each no later than the one before it."""
    times = 1
    for previous, last in zip(reversed(history[:-1]), reversed(history), strict=False):
        same = previous.failure and last.failure and previous.failure.signature == last.failure.signature
        # An attempt that goes on after a later step than was known of the one before it shows how far that one came:
        # of launchers that were all killed, the latest steps are not known.
        further = last.restored is not None and previous.step is not None and last.restored > previous.step
        if not same or further or made_progress(previous, last):
            break
        times += 1
    return times


def made_progress(previous: Attempt | None, last: Attempt) -> bool:
    """Return whether an attempt completed a step that the one before it had not completed.

    Where neither has reported its steps (a script that makes none of torch's optimizers), a minute counts as progress.
    So it does where fewer steps were counted than before, and nothing tells whether the script has resumed.
    """
    before = previous.step if previous else None
    if last.step is None and before is None:
        # No checkpoint could be read or written, perhaps before the ranks began, however long they have tried.
        failure = last.failure
        storage = failure and (failure.kind in (Kind.STORAGE, Kind.DISK_FULL) or failure.type == StorageError.__name__)
        # Ranks that tell where they begin tell their steps too.
        return _duration(last) >= QUICK and last.restored is None and not storage
    if last.restored is None and last.step and before and last.step < before and _duration(last) >= QUICK:
        return True
    return (last.step or 0) > max(before or 0, last.restored or 0)


def _delay(history: Sequence[Attempt], meaning: Meaning, limits: Limits) -> float:
    """Seconds to wait: none after the first failure, then 1, 2, 4 and so on, while no attempt makes progress."""
    in_a_row = 0
    for index in range(len(history) - 1, -1, -1):
        attempt, previous = history[index], history[index - 1] if index else None
        if attempt.failure is None or attempt.failure.kind.meaning.planned or made_progress(previous, attempt):
            break
        in_a_row += 1
    return min(limits.backoff, max(meaning.delay, 2.0 ** (in_a_row - 2) if in_a_row > 1 else 0.0))


def _spent(limit: int, budget: str) -> str:
    if limit == 0:
        return f"the job allows no {budget}"
    return f"its only {budget[:-1]} is used" if limit == 1 else f"all {limit} {budget} are used"


def _duration(attempt: Attempt) -> float:
    return attempt.ended - attempt.started if attempt.ended is not None else 0.0


class Failures:
    """The failures of the latest attempt, and the pods whose connections were closed without one."""

    def __init__(self) -> None:
        self._seen: list[Failure] = []
        self._closed: set[int] = set()

    def __iter__(self) -> Iterator[Failure]:
        return iter(self._seen)

    def clear(self) -> None:
        """Forget all: an attempt starts."""
        self._seen = []
        self._closed.clear()

    def add(self, *failures: Failure) -> None:
        """Note failures in the order in which they were reported."""
        self._seen += failures

    def add_closed(self, pod: int) -> None:
        """Note that a pod's connection was closed, which explains its end if the pod has reported no failure."""
        if all(failure.pod != pod for failure in self._seen):
            self._closed.add(pod)

    def explain(
        self,
        attempt: Attempt,
        joined: Mapping[int, Join],
        places: Mapping[int, tuple[str, str]],
        replaced: Collection[int],
    ) -> Attempt:
        """Return the attempt with its root cause among the failures.

        ``places`` has the names of pod and node of the pods that took part. ``joined`` has the launchers that are
        ready for the next attempt, and ``replaced`` the pods whose launcher is another than in this attempt.
        """

        def described(failure: Failure) -> Failure:
            """``failure`` with the names of a pod that the leader lost, and with facts that are known by now."""
            pod = failure.pod
            if failure.kind is not Kind.LOST or failure.pod_name:
                return failure
            join = joined.get(pod)
            known = places.get(pod) or ((join.pod_name, join.node) if join else None)
            if known is None:
                return failure
            failure = replace(failure, pod_name=known[0], node=known[1])
            if pod not in replaced:
                return failure
            if pod in self._closed:
                return replace(failure, kind=Kind.CONTAINER_KILLED, message="")
            return replace(failure, message="was restarted")

        seen = [described(failure) for failure in self._seen if failure.attempt == attempt.number]
        if attempt.failure:
            seen.append(described(attempt.failure))
        if not seen:
            return attempt
        steps = [attempt.step, *(each.step for each in seen), *(join.step for join in joined.values())]
        known = [step for step in steps if step is not None]
        cause = root_cause(_lost_leader(seen, places, back=joined.keys() - set(replaced)) or seen)
        return replace(attempt, failure=cause, step=max(known, default=None))


def _lost_leader(
    seen: Sequence[Failure], places: Mapping[int, tuple[str, str]], back: Collection[int]
) -> list[Failure]:
    """These failures and, first, the loss of pod 0, if every other pod of several has lost the connection to it.

    Empty if that is not so. Only pods count whose same launcher is ``back``: it has survived the cut. Pods that do not
    come back, or come with another launcher, are lost themselves, perhaps all at once. A pod 0 that stood still for a
    while may have lost the connection to itself too.
    """
    cut = [each for each in seen if each.kind is Kind.LOST and each.message.startswith(DISCONNECTED)]
    alone = [each for each in cut if each.pod in back]
    if len(places) < 3 or {0, *(each.pod for each in alone)} != places.keys():
        return []
    first = min(alone, key=lambda failure: failure.time)
    name, node = places[0]
    return [replace(first, pod=0, pod_name=name, node=node, message="lost the connection to all other pods"), *seen]
