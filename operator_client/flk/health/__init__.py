"""Checks and diagnosis: why a job does not run and why it ended, as pure functions in one file for each subject.

Each subject has the checks of a cluster before a job exists (`flk doctor`, `flk submit --dry-run`), and the causes that
are found in the objects of a job afterwards (`flk why`, `status`, `wait`). Nothing here sends a request or prints:
`flk.jobs` reads the objects.
"""

from flk.health.cause import Cause, page
from flk.health.ending import job_failure
from flk.health.failure import with_memory_limit
from flk.health.table import CAUSES, cause_of, find
from flk.health.why import Diagnosis, diagnose

__all__ = [
    "CAUSES",
    "Cause",
    "Diagnosis",
    "cause_of",
    "diagnose",
    "find",
    "job_failure",
    "page",
    "with_memory_limit",
]
