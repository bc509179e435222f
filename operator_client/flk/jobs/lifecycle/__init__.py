"""Change jobs in a cluster: create a job with all its objects, scale, suspend and resume it, restart it, delete it.

`flk.jobs.submission` and commands import it.
"""

from flk.jobs.lifecycle.creation import create_job, dry_run
from flk.jobs.lifecycle.deletion import delete_jobs
from flk.jobs.lifecycle.restart import restart
from flk.jobs.lifecycle.suspension import losses, resume, scale, suspend, wait_for_all_pods_to_end

__all__ = [
    "create_job",
    "delete_jobs",
    "dry_run",
    "losses",
    "restart",
    "resume",
    "scale",
    "suspend",
    "wait_for_all_pods_to_end",
]
