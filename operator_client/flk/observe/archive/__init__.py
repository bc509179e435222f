"""The archive of jobs: observations and records that outlive the pods of a job and the job itself.

While flk follows a job, it archives what it sees in the user's state folder (`flk.observe.archive.local`), and the
launchers archive their record in a ConfigMap (`flk.observe.archive.records`). `find` reads both.
"""

from __future__ import annotations

from dataclasses import replace

from flk.observe.archive.local import LocalArchive
from flk.observe.archive.records import FIRST_POD, find_record
from flk.observe.client import JobClient
from flk.observe.observation import FAILED, Observation
from flk.observe.view import JobView

__all__ = ["LocalArchive", "find"]


def find(client: JobClient, name: str, uid: str | None = None) -> Observation | None:
    """Return the archived observation of the job with that UID, or of the newest job of that name; None without one.

    Where state folder and cluster both know the same job, the newer record and the newer lines count.
    """
    ref = client.ref(name)
    uid = uid or ref.uid or None
    here, there = LocalArchive(client).find(name, uid), find_record(client, name, uid)
    if here is not None and here.job is not None and not ref.means(here.job):
        here = None
    if here is None or there is None:
        return here or there
    if here.uid != there.uid:
        return max(here, there, key=lambda archived: archived.time)
    if there.time <= here.time:
        return here
    first = next((pod.name for pod in JobView(here).pods), FIRST_POD)
    logs = {**here.logs, first: there.logs[FIRST_POD]}
    times = {pod: known for pod, known in here.log_times.items() if pod != first}
    cause = None if _went_on(here, there) else here.cause
    return replace(here, record=there.record, logs=logs, log_times=times, time=there.time, cause=cause)


def _went_on(here: Observation, there: Observation) -> bool:
    """Return whether the job has gone on since flk saw it: an attempt has begun or ended that flk does not know."""
    if here.cause is not None and here.cause.phase == FAILED:
        return False
    known, newer = here.record, there.record
    return newer is not None and (
        newer.outcome in ("succeeded", "failed") or len(newer.attempts) > (len(known.attempts) if known else 0)
    )
