"""exchange_reports(): all ranks send their report to rank 0 through the store, and rank 0 sends back the result.

Every rank appends one line to one key and waits for the result, so the cost is a few messages per rank.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from flk_runtime.errors import RendezvousError, RuntimeFailure, SetupError
from flk_runtime.preflight.compare import compare, describe_process, missing
from flk_runtime.preflight.report import RankReport

_COMPARE_EVERY = 1.0  # seconds between two comparisons of the reports that are there already
_POLL_MIN = 0.001  # seconds: rank 0's first poll interval, doubled up to _POLL_MAX
_POLL_MAX = 0.05
_GRACE = 5.0  # seconds that a rank which reached the store just before the deadline still waits
SAY_AFTER = 10.0  # seconds that a rank waits before it says so
_LINGER = 5.0  # seconds that a failing rank waits for the others to read the faults


def exchange_reports(
    store: Any, own: RankReport, timeout: float, started: float, skipped: Collection[str] = ()
) -> list[RankReport]:
    """The reports of all ranks on rank 0, which compares them; an empty list elsewhere. Collective.

    Waits until ``timeout`` seconds after ``started`` (a time of time.monotonic()). ``skipped`` are the checks that are
    not made (see `compare`). Raises SetupError with the faults on every rank, one per line; RendezvousError if it is
    the only one that ranks are missing, so that another attempt may succeed.
    """
    # A rank that reaches the store just before the deadline must still hear from rank 0, which may join as late.
    deadline = max(started + timeout, time.monotonic() + min(timeout, _GRACE))
    store.append("roster", own.dump() + "\n")
    joined = store.add("joined", 1)
    if joined >= own.world_size:
        store.set("all", "")
    if own.rank == 0 and store.add("leader", 1) == 1:
        store.set("leader/node", own.node)
        return _lead(store, own, timeout, deadline, skipped)
    _follow(store, own, timeout, deadline, first=joined == 1)
    if joined > own.world_size:  # rank 0 had compared before this rank joined
        raise SetupError(_too_late(own, _roster(store)))
    return []


def _lead(store: Any, own: RankReport, timeout: float, deadline: float, skipped: Collection[str]) -> list[RankReport]:
    """Wait on rank 0 for all reports, compare them, and publish the faults."""
    interval, next_comparison = _POLL_MIN, time.monotonic() + _COMPARE_EVERY
    faults: list[str] = []
    waiting = Waiting(deadline)
    while not store.check(["all"]) and time.monotonic() < deadline and not faults:
        time.sleep(interval)
        interval = min(_POLL_MAX, interval * 2)
        if time.monotonic() >= next_comparison:
            before = time.monotonic()
            present = _roster(store)
            faults = compare(present, skipped)  # two ranks that differ end the start at once, without the missing ones
            if waiting.is_due():
                waiting.say(f"waiting for {missing(present)}")
            next_comparison = time.monotonic() + max(_COMPARE_EVERY, 10 * (time.monotonic() - before))
    reports = _roster(store)
    faults = compare(reports, skipped)
    retryable = not faults
    absent = missing(reports) if time.monotonic() >= deadline or not faults else ""
    if absent:
        faults.append(
            f"{absent} did not join within {timeout:g} s, {len(reports)} joined: read their logs, and check that they "
            "were started, with the right node rank and master address; where ranks start slowly, raise "
            "FLK_PREFLIGHT_TIMEOUT"
        )
    store.set("result", json.dumps([faults, retryable, len(reports)]))
    _raise(store, faults, retryable, len(reports))
    return reports


def _follow(store: Any, own: RankReport, timeout: float, deadline: float, *, first: bool) -> None:
    """Wait on every other rank for the result. The ``first`` rank that has joined says that rank 0 is missing."""
    me = f"rank {own.rank} on node {own.node}"
    try:
        has_waited = first and not _wait(store, "result", min(SAY_AFTER, deadline - time.monotonic()))
        if has_waited and not store.check(["leader/node"]):
            Waiting(deadline).say(f"waiting for rank 0 of {own.world_size}")
        if not _wait(store, "result", deadline - time.monotonic()):
            # Rank 0 may have joined last; then its time is not over yet. Only counters are read here: with thousands of
            # ranks, all their reports read by each of them would be too much for the store.
            if not store.check(["leader/node"]):
                raise RendezvousError(
                    f"rank 0 did not join within {timeout:g} s; {store.add('joined', 0)} of {own.world_size} ranks "
                    f"joined, one of them {me}: read the log of rank 0, or raise FLK_PREFLIGHT_TIMEOUT if ranks start "
                    "slowly"
                )
            if not _wait(store, "result", timeout + _LINGER):
                raise RendezvousError(
                    f"{me} got no result from rank 0 on node {store.get('leader/node').decode()}, which had joined: "
                    "read the log of rank 0"
                )
        faults, retryable, joined = json.loads(store.get("result"))
    except RuntimeError as error:
        raise RendezvousError(
            f"{me}: rank 0 ended during the preflight ({str(error).splitlines()[0]}): read the log of rank 0"
        ) from error
    _raise(store, faults, retryable, joined)


def _raise(store: Any, faults: Sequence[str], retryable: bool, ranks: int) -> None:
    """Raise the ``faults``, if there are any, once all ranks have read them.

    The first rank that ends may end the store and all other ranks.
    """
    if not faults:
        return
    with contextlib.suppress(RuntimeError):
        if store.add("read", 1) >= ranks:
            store.set("all read", "")
        store.wait(["all read"], timedelta(seconds=_LINGER))
    error: RuntimeFailure = (RendezvousError if retryable else SetupError)("\n".join(faults))
    error.everywhere = True
    raise error


def _wait(store: Any, key: str, seconds: float) -> bool:
    """Whether ``key`` was set within that time. Raises RuntimeError if the store is gone."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, seconds)))
    except RuntimeError:
        return bool(store.check([key]))
    return True


def _roster(store: Any) -> list[RankReport]:
    """The reports of the ranks that have joined."""
    return [RankReport.load(line) for line in store.get("roster").splitlines()] if store.check(["roster"]) else []


def _too_late(own: RankReport, roster: Sequence[RankReport]) -> str:
    others = [one for one in roster if one.rank == own.rank and (one.pid, one.node) != (own.pid, own.node)]
    taken = f"rank {own.rank} is {describe_process(others[0])}" if others else f"{own.world_size} ranks are complete"
    return (
        f"rank {own.rank} on node {own.node} (process {own.pid}) joined after all ranks had joined, and {taken}: give "
        "every process a rank of its own, or end the earlier run that still uses this master's port"
    )


class Waiting:
    """Says once that a rank waits, after 10 seconds."""

    def __init__(self, deadline: float) -> None:
        """``deadline`` is when the rank gives up, by time.monotonic."""
        self._deadline = deadline
        self._due = time.monotonic() + SAY_AFTER

    def is_due(self) -> bool:
        """Return whether it is time for the line."""
        return time.monotonic() >= self._due

    def say(self, text: str) -> None:
        """Print the line to stderr, with the time that is left."""
        self._due = math.inf
        left = max(0.0, self._deadline - time.monotonic())
        print(f"flk: {text}; giving up in {left:.0f} s", file=sys.stderr, flush=True)
