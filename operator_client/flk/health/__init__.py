"""What keeps a job from running, and what ended it: one file for each subject, of pure functions.

Each subject knows what is checked in a cluster before a job exists (`flk doctor`, `flk submit --check`), and what is
found in the objects of a job afterwards (`flk why`, `status`, `wait`). Nothing here sends a request or prints:
`flk.jobs` reads the objects.
"""

from flk.health.cause import Cause
from flk.health.ending import job_failure
from flk.health.failure import with_memory_limit
from flk.health.page import page
from flk.health.table import CAUSES, find
from flk.health.why import Report, report

__all__ = [
    "CAUSES",
    "Cause",
    "Report",
    "find",
    "job_failure",
    "page",
    "report",
    "with_memory_limit",
]
