"""What the objects of a job mean: why it does not run, or why it ended, by pure functions.

`Picture` holds the objects of one job at one moment. Nothing here sends a request or prints. `flk.jobs` reads the
objects and makes the picture; `flk.jobs` and `flk.cli` import this package, and it imports neither of them.
"""

from flk.diagnose.failure import reason_of, root_failure, with_memory_limit
from flk.diagnose.model import Evidence, Finding, PodPhase, PodState
from flk.diagnose.picture import Picture, Surroundings, event_time

__all__ = [
    "Evidence",
    "Finding",
    "Picture",
    "PodPhase",
    "PodState",
    "Surroundings",
    "event_time",
    "reason_of",
    "root_failure",
    "with_memory_limit",
]
