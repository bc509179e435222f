"""Change the number of pods of an elastic job through the replicas of its object.

The controller deletes the pods with the highest indexes, which get SIGTERM and save, or creates more. The
launchers let all ranks save after the same step and go on with the pods that are there (`flk_runtime.launcher`).
"""

from __future__ import annotations

from flk.errors import UsageError
from flk.jobs.lifecycle.placement import change_job
from flk.jobs.lifecycle.suspension import changeable_job
from flk.jobs.state import derive
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.observe.view import JobView
from flk.targets import target_of
from flk_runtime.contract.ranges import plural


def scale(client: JobClient, name: str, pods: int) -> int:
    """Give a job ``pods`` pods. Return how many it should have had before.

    Raises UsageError if the job is not elastic, has ended, is in a queue, or may not have as many pods, and
    JobNotFoundError if there is none.
    """
    job = changeable_job(client, name)
    state = derive(JobView(Observation(job)))
    if state.min_size >= state.max_size:
        raise UsageError(
            f"job {name} is not elastic: it trains with {plural(state.max_size - state.spares, 'pod')} and no others",
            hint="submit it with --elastic MIN:MAX, as in --elastic 2:4",
        )
    if not state.min_size <= pods <= state.max_size:
        raise UsageError(f"PODS: must be from {state.min_size} to {state.max_size} for job {name} (is {pods})")
    if pods != state.replicas:
        change_job(client, job, target_of(job).scaling(job, pods))
    return state.replicas
