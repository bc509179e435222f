"""exchange_reports(): all ranks send their report to rank 0 through the store, and rank 0 sends back the result.

Every rank appends one line to one key and waits for the result, so the cost is a few messages per rank.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from flk_runtime.errors import RendezvousError, RuntimeFailure, SetupError
from flk_runtime.preflight.compare import compare, missing
from flk_runtime.preflight.report import RankReport

_COMPARE_EVERY = 1.0  # seconds between two comparisons of the reports that are there already
_POLL_MIN = 0.001  # seconds: rank 0's first poll interval, doubled up to _POLL_MAX
_POLL_MAX = 0.05
_GRACE = 5.0  # seconds that a rank which reached the store just before the deadline still waits
SAY_AFTER = 10.0  # seconds that a rank waits before it says so
_LINGER = 5.0  # seconds that a failing rank waits for the others to read the faults


def exchange_reports(store: Any, own: RankReport, timeout: float, started: float) -> list[RankReport]:
    """The reports of all ranks on rank 0, which compares them; an empty list elsewhere. Collective.

    Waits until ``timeout`` seconds after ``started`` (a time of time.monotonic()). Raises SetupError with the faults on
    every rank, one per line; RendezvousError if ranks are missing, so that another attempt may succeed.
    """
    # A rank that reaches the store just before the deadline must still hear from rank 0, which may join as late.
    deadline = max(started + timeout, time.monotonic() + min(timeout, _GRACE))
    store.append("roster", json.dumps(list(vars(own).values()), separators=(",", ":")) + "\n")
    joined = store.add("joined", 1)
    if own.rank == 0 and store.add("leader", 1) == 1:
        store.set("leader is there", "")
        return _lead(store, own, timeout, deadline)
    if joined > _follow(store, own, timeout, deadline):  # the number of those that were compared
        raise SetupError(
            f"rank {own.rank} on node {own.node} (process {own.pid}) joined after all {own.world_size} ranks had "
            "joined: give every process a rank of its own, or end the earlier run that still uses this master's port"
        )
    return []


def _lead(store: Any, own: RankReport, timeout: float, deadline: float) -> list[RankReport]:
    """Wait on rank 0 for all reports, compare them, and publish the faults."""
    interval, next_comparison = _POLL_MIN, time.monotonic() + _COMPARE_EVERY
    waiting = Waiting(deadline)
    while store.add("joined", 0) < own.world_size and time.monotonic() < deadline:
        time.sleep(interval)
        interval = min(_POLL_MAX, interval * 2)
        if time.monotonic() >= next_comparison:
            present = _roster(store)
            if compare(present):  # two ranks that differ end the start at once, without the missing ones
                break
            if waiting.is_due():
                waiting.say(f"waiting for {missing(present)}")
            next_comparison = time.monotonic() + _COMPARE_EVERY
    reports = _roster(store)
    faults = compare(reports)
    absent = missing(reports) if len(reports) < own.world_size and not faults else ""
    if absent:
        faults.append(
            f"{absent} did not join within {timeout:g} s, {len(reports)} joined: read their logs, and check that they "
            "were started, with the right node rank and master address; where ranks start slowly, raise "
            "FLK_PREFLIGHT_TIMEOUT"
        )
    store.set("result", json.dumps([faults, bool(absent), len(reports)]))
    if faults:
        _raise(store, faults, bool(absent), len(reports))
    return reports


def _follow(store: Any, own: RankReport, timeout: float, deadline: float) -> int:
    """Wait on every other rank for the result. Returns how many ranks were compared."""
    me = f"rank {own.rank} on node {own.node}"
    try:
        # Only counters are read here: with thousands of ranks, all their reports read by each would be too much.
        if not _wait(store, "leader is there", deadline - time.monotonic()):
            raise RendezvousError(
                f"rank 0 did not join within {timeout:g} s; {store.add('joined', 0)} of {own.world_size} ranks joined, "
                f"one of them {me}: read the log of rank 0, or raise FLK_PREFLIGHT_TIMEOUT if ranks start slowly"
            )
        # Rank 0 may have joined last; then its time is not over yet.
        if not _wait(store, "result", timeout + _LINGER):
            raise RuntimeError(f"none within {timeout + _LINGER:g} s")
        faults, may_pass, compared = json.loads(store.get("result"))
    except RuntimeError as error:
        raise RendezvousError(
            f"{me}: rank 0 gave no result of the preflight ({str(error).splitlines()[0]}): read the log of rank 0"
        ) from error
    if faults:
        _raise(store, faults, may_pass, compared)
    return int(compared)


def _raise(store: Any, faults: Sequence[str], may_pass: bool, ranks: int) -> None:
    """Raise the ``faults`` once all ranks have read them.

    The first rank that ends may end the store and all other ranks.
    """
    with contextlib.suppress(RuntimeError):
        if store.add("read", 1) >= ranks:
            store.set("all read", "")
        store.wait(["all read"], timedelta(seconds=_LINGER))
    error: RuntimeFailure = (RendezvousError if may_pass else SetupError)("\n".join(faults))
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
    lines = store.get("roster").splitlines() if store.check(["roster"]) else []
    return [RankReport(*json.loads(line)) for line in lines]


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
