"""`flk resume`: start suspended jobs again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flk.cli.options import Context, Namespace
from flk.cli.several import Chosen, Jobs, Selector, Tell

if TYPE_CHECKING:
    from flk.observe.client import JobClient, JobRef


def resume(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
) -> int:
    """Start suspended jobs again, each at its last checkpoint in a volume or in S3.

    Their counts of restarts begin anew. With -l, only jobs that flk has made are resumed.
    """
    from flk.jobs import lifecycle

    def act(client: JobClient, job: JobRef, tell: Tell) -> None:
        resumed = lifecycle.resume(client, job.name)
        state = "is resumed" if resumed else "was not suspended"
        tell(f"job {job.name} {state}; this shows what its ranks print: {client.commands.flk('logs', job.name)}")

    return Chosen.of(jobs, selector, context, namespace, command="resume", own=True).in_parallel(act)
