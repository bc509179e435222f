"""Deleting jobs so that nothing of them is left when it is said that they are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flk.errors import JobNotFoundError, WaitTimeoutError
from flk.jobs.client import JobClient
from flk.jobs.follower import Follower

TELL_AFTER: Final = 5.0  # seconds of waiting that are worth a word


def delete_jobs(
    cluster: JobClient, names: Sequence[str], *, wait: bool, timeout: float | None, tell: Callable[[str], None]
) -> Iterator[tuple[str, bool]]:
    """Delete all jobs at once, then yield each with whether it was there; with ``wait`` once its pods are gone too.

    WaitTimeoutError when the jobs that are being deleted are not gone after ``timeout`` seconds.
    """
    until = None if timeout is None else time.monotonic() + timeout
    uids: dict[str, str] = {}
    for name in names:
        try:
            uid = cluster.job(name)["metadata"]["uid"]
            cluster.delete_job(name, uid)
            uids[name] = uid
        except JobNotFoundError:
            yield name, False
    for name, uid in uids.items():
        if wait:
            _until_gone(cluster, name, uid, until, tell)
        yield name, True


def _until_gone(cluster: JobClient, name: str, uid: str, until: float | None, tell: Callable[[str], None]) -> None:
    began, told = time.monotonic(), False
    with Follower(cluster, name, uid) as follower:
        for snapshot in follower.snapshots(beat=0.5):
            if snapshot.job is None and not snapshot.pods:
                return
            now = time.monotonic()
            if until is not None and now >= until:
                left = len(snapshot.pods)
                raise WaitTimeoutError(
                    f"job {name} is being deleted and not gone yet: {left} pods are left",
                    hint="a pod on a node that does not answer stays until the node is removed or is back",
                )
            if now - began > TELL_AFTER and not told:
                told = True
                tell(f"waiting for {len(snapshot.pods)} pods of {name} to end")
