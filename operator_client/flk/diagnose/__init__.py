"""What the objects of a job mean: why it does not run, or why it ended, by pure functions.

`Picture` holds the objects of one job at one moment, and `find` applies the table of causes to it. Nothing here sends a
request or prints. `flk.jobs` reads the objects; `flk.jobs` and `flk.cli` import this package, and it imports neither.
"""

from flk.diagnose.causes import CAUSES, Cause, awaits_controller, find, job_failure
from flk.diagnose.failure import with_memory_limit
from flk.diagnose.model import Evidence, Finding, PodPhase, PodState
from flk.diagnose.page import page
from flk.diagnose.picture import Kept, Picture, Surroundings, event_time
from flk.diagnose.progress import Progress, read_progress
from flk.diagnose.why import Report, report

__all__ = [
    "CAUSES",
    "Cause",
    "Evidence",
    "Finding",
    "Kept",
    "Picture",
    "PodPhase",
    "PodState",
    "Progress",
    "Report",
    "Surroundings",
    "awaits_controller",
    "event_time",
    "find",
    "job_failure",
    "page",
    "read_progress",
    "report",
    "with_memory_limit",
]
