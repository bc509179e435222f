"""Watch the pods of a job end, with a deadline and reports, as deletion and suspension both do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from flk.errors import WaitTimeoutError
from flk.observe.client import JobClient
from flk.observe.follower import Follower
from flk.observe.observation import Observation
from flk_runtime.contract.ranges import plural

REPORT_EVERY: Final = 5.0  # seconds between two reports while flk waits


def watch_pods_end(
    client: JobClient,
    job: tuple[str, str],
    *,
    until: float | None,
    report: Callable[[str], None],
    awaited: str,
    overdue: str,
) -> Iterator[Observation]:
    """Yield observations of a job (name and UID) while its pods end, until the caller stops.

    ``report`` is called periodically with the number of pods left and ``awaited``, what they still do. Raises
    WaitTimeoutError, which begins with ``overdue``, once time.monotonic() has reached ``until``.
    """
    reported = time.monotonic()
    with Follower(client, *job) as follower:
        for seen in follower.updates(interval=0.5):
            yield seen
            now, left = time.monotonic(), plural(len(seen.pods), "pod")
            if until is not None and now >= until:
                raise WaitTimeoutError(
                    f"{overdue}: {left} left",
                    hint="a pod on a node that does not answer stays until the node is removed or is back",
                )
            if now - reported > REPORT_EVERY:
                reported = now
                report(f"waiting for {left} of {job[0]} to {awaited}")
