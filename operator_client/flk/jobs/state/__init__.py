"""The state of a job, derived from its objects, its events and the launchers' records by pure functions.

`derive` makes a `State` of a job that exists, `deleted` of one that does not exist any more. Commands, `flk.jobs.wait`
and `flk.jobs.logs` read it; nothing here sends a request.
"""

from flk.jobs.state.derive import deleted, derive, unreadable
from flk.jobs.state.model import SCHEMA, AttemptState, JobList, Phase, State
from flk.observe.model import PodPhase, PodState

__all__ = [
    "SCHEMA",
    "AttemptState",
    "JobList",
    "Phase",
    "PodPhase",
    "PodState",
    "State",
    "deleted",
    "derive",
    "unreadable",
]
