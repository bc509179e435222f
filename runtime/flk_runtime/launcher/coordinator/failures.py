"""The failures of an attempt that all pods have reported, and the root cause among them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from flk_runtime.contract.failure import Failure, Kind, root_cause
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.transport.messages import Join

_RESTARTED = "was restarted"


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
            if join is None or pod not in replaced:
                return failure
            if pod in self._closed:
                return replace(failure, kind=Kind.CONTAINER_KILLED, message="")
            return replace(failure, message=_RESTARTED)

        seen = [described(failure) for failure in self._seen if failure.attempt == attempt.number]
        if attempt.failure:
            seen.append(described(attempt.failure))
        if not seen:
            return attempt
        steps = [attempt.step, *(each.step for each in seen), *(join.step for join in joined.values())]
        known = [step for step in steps if step is not None]
        return replace(attempt, failure=root_cause(seen), step=max(known, default=None))
